"""What a user can put right: one sentence that names the field, the value and what would be right."""


class UserError(ValueError):
    """Bad input. The command line prints the sentence and exits with code 2."""
