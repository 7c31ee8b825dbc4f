"""A Hugging Face decoder as units: cut, laid out in flat buffers, paused and resumed."""
