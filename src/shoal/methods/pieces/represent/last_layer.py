"""Last layers of the models of the first round, as in FedClusterEnsemble."""

from shoal.methods.composition.capability import CLIENT_VECTORS, FIRST_ROUND_MODELS, INDIVIDUAL_UPDATES
from shoal.methods.composition.piece import Piece, register


@register("represent", "last-layer")
class LastLayers(Piece):
    """Compares clients by the last layers of the models that they train in the first round."""

    source = "Freitas et al. (FedClusterEnsemble), Alg. 2, line 9"
    requires = (INDIVIDUAL_UPDATES,)
    provides = (FIRST_ROUND_MODELS, CLIENT_VECTORS)
    must_be_used = (FIRST_ROUND_MODELS, CLIENT_VECTORS)
    client_sends = "nothing but the model that it trained"
    server_learns = "the last layer of each client's first model, which the server keeps"
