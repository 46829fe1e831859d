"""Rules of losses."""

from shardwise.rules.losses import class_losses, linear_cross_entropy, losses

__all__ = ["class_losses", "linear_cross_entropy", "losses"]
