"""Several processes that are one worker of a membership."""
