"""Stand-ins with which a guard tries at start whether this release of mlx-lm has its defect."""
