"""A method's evaluation from one file: what is run, what is measured, and what is then said of it."""
