"""The loops of SFT, RL and pretraining: batch, step, log, evaluate, save."""
