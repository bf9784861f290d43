"""The parts of train_gpt.py: options, data, model, the data-parallel step, reports."""
