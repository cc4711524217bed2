"""The prediction service for unseen clients, and `Remote`, which sends requests to it.

`app.py` has the paths of the service, `model_version.py` computes predictions, and `remote.py` is the caller's side.
"""

from shoal.serve.remote import PredictResponse, Remote, RequestRejected, ServiceUnavailable, UntrustedCertificate

__all__ = ["PredictResponse", "Remote", "RequestRejected", "ServiceUnavailable", "UntrustedCertificate"]
