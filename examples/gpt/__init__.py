"""The parts of train_gpt.py: options, data, model, operators and step on a mesh, reports."""
