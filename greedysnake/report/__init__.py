"""What a person sees of a run: the live line, metrics, traces and pictures."""
