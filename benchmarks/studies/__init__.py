"""Studies: tables of trainings in the Lab, and a command that runs them: `python -m benchmarks.studies NAME`."""
