"""One executor that carries out schedules, and the trainer around it."""
