"""`cowrec sweep` and `cowrec tune`: runs of one configuration with other values, over a grid or as Optuna proposes."""
