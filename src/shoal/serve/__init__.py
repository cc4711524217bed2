"""The prediction service for clients that never trained, and the caller's side of it."""

from shoal.serve.remote import Away, Predicted, Refused, Remote, Untrusted

__all__ = ["Away", "Predicted", "Refused", "Remote", "Untrusted"]
