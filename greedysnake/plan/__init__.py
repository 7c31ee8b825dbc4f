"""What this machine has, what a run needs, and so what goes where."""
