"""The parts of train_moe.py: options, the model, the step on a data x expert mesh."""
