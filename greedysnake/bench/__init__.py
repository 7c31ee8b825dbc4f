"""Systems compared on one machine: each cell of a matrix in a process of its own, within the same hard limits."""
