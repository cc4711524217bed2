"""The prediction service for clients that never trained, and the caller's side of it."""

from shoal.serve.remote import PredictResponse, Remote, RequestRejected, ServiceUnavailable, UntrustedCertificate

__all__ = ["PredictResponse", "Remote", "RequestRejected", "ServiceUnavailable", "UntrustedCertificate"]
