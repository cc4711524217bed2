"""A table of clients as a mapping from clients to the values of a column."""

import torch

from shoal.client_table import ClientTable

TABLE = ClientTable.from_rows(
    {
        "b": {"size": torch.tensor(2), "vector": torch.tensor([3.0, 4.0])},
        "a": {"size": torch.tensor(1), "vector": torch.tensor([1.0, 2.0])},
    }
)


def test_to_dict_maps_clients_to_python_values():
    assert TABLE.to_dict("size") == {"a": 1, "b": 2}
    assert TABLE.to_dict("vector") == {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_to_dict_of_an_empty_table_is_empty_for_any_column():
    assert ClientTable().to_dict("size") == {}


def test_to_dict_survives_storage():
    assert ClientTable.from_tree(TABLE.to_tree()).to_dict("size") == TABLE.to_dict("size")
