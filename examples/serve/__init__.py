"""The parts of serve_tp.py."""
