"""What a host of the cluster does: steps whose computing is waited, delays, and the trainings to an accuracy."""
