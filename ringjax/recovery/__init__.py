"""How this rank goes on when ranks come and go: from a loss to the next epoch.

The rules are in `ringjax.membership`, what users see of it in `ringjax.elastic`.
"""
