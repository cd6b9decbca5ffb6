"""The three kinds of process that do work: target, trainer, server."""
