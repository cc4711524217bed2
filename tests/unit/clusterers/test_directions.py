"""Principal components of rows, from their products."""

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import normalize

from shoal.clusterers import directions
from shoal.clusterers.directions import principal_directions
from shoal.errors import UserError

BOTH = pytest.mark.parametrize("is_centred", [False, True], ids=["as printed", "centred"])


def random_rows(rows=12, columns=40, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)) * np.arange(1, rows + 1)[:, None]


class TestByHand:
    def test_as_printed(self):
        # unit rows (1, 0), (1, 0), (0, 1): products have eigenvalues 2 with (1, 1, 0)/√2 and 1 with (0, 0, 1)
        rows = [[3.0, 0.0], [5.0, 0.0], [0.0, 2.0]]
        np.testing.assert_allclose(principal_directions(rows, 1), [[1, 0], [1, 0], [0, 1]], atol=1e-12)
        assert principal_directions(rows, 2 / 3).shape == (3, 1)
        assert principal_directions(rows, 0.67).shape == (3, 2)

    def test_centred(self):
        # (1, 0) and (0, 1) lie at ±√½ from their mean; one component, the first entry positive
        found = principal_directions([[4.0, 0.0], [0.0, 9.0]], 1, is_centred=True)
        np.testing.assert_allclose(found, [[np.sqrt(0.5)], [-np.sqrt(0.5)]])

    def test_explained_variance_of_equal_eigenvalues(self):
        # five orthogonal rows: five eigenvalues of 1, so three explain exactly 0.6 of their sum
        assert [principal_directions(np.eye(5), fraction).shape[1] for fraction in (0.2, 0.6, 0.61, 1)] == [1, 3, 4, 5]
        assert principal_directions(np.eye(5), 1, is_centred=True).shape == (5, 4)


class TestFacts:
    def test_as_printed_products_are_cosines(self):
        z = principal_directions(random_rows(), 1)
        np.testing.assert_allclose(z @ z.T, cosine_similarity(random_rows()), atol=1e-12)

    def test_centred_distances_are_those_of_unit_rows(self):
        z = principal_directions(random_rows(), 1, is_centred=True)
        squares = ((z[:, None] - z[None]) ** 2).sum(-1)
        np.testing.assert_allclose(squares, 2 - 2 * cosine_similarity(random_rows()), atol=1e-12)
        np.testing.assert_allclose(z.mean(0), 0, atol=1e-14)

    @pytest.mark.parametrize("explained_variance", [0.3, 0.8, 0.95])
    def test_centred_is_textbook_pca(self, explained_variance):
        found = principal_directions(random_rows(), explained_variance, is_centred=True)
        expected = PCA(explained_variance, svd_solver="full").fit_transform(normalize(random_rows()))
        np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-10)

    @pytest.mark.parametrize("explained_variance", [0.3, 0.8, 0.95])
    def test_as_printed_is_the_singular_value_decomposition(self, explained_variance):
        left, values, _ = np.linalg.svd(normalize(random_rows()), full_matrices=False)
        # rows of unit length: the squares sum to the number of rows
        count = np.flatnonzero(np.cumsum(values**2) >= explained_variance * 12)[0] + 1
        np.testing.assert_allclose(
            np.abs(principal_directions(random_rows(), explained_variance)),
            np.abs(left * values)[:, :count],
            atol=1e-10,
        )

    @BOTH
    def test_the_entry_farthest_from_zero_is_positive(self, is_centred):
        z = principal_directions(random_rows(), 1, is_centred)
        assert (z[np.abs(z).argmax(0), np.arange(z.shape[1])] > 0).all()

    @BOTH
    @pytest.mark.parametrize("factor", [7.0, 1e-200, 1e200])
    def test_lengths_do_not_matter(self, is_centred, factor):
        rows = random_rows()
        expected = principal_directions(rows, 0.9, is_centred)
        rows[3] *= factor
        np.testing.assert_allclose(principal_directions(rows, 0.9, is_centred), expected, atol=1e-12)

    @BOTH
    def test_rows_are_permuted_with_their_components(self, is_centred):
        order = np.random.default_rng(1).permutation(12)
        expected = principal_directions(random_rows(), 0.9, is_centred)[order]
        np.testing.assert_allclose(principal_directions(random_rows()[order], 0.9, is_centred), expected, atol=1e-12)

    @BOTH
    def test_blocks_change_nothing(self, is_centred, monkeypatch):
        expected = principal_directions(random_rows(), 0.9, is_centred)
        monkeypatch.setattr(directions, "_COLUMNS", 7)  # 40 columns: five blocks and a rest
        np.testing.assert_allclose(principal_directions(random_rows(), 0.9, is_centred), expected, atol=1e-13)

    def test_single_precision_is_summed_in_double(self):
        # with n = 2^20 entries x, and one of them 100 in the second row: products n x², (n - 1) x² + 100 x and
        # (n - 1) x² + 100²
        rows = np.full((2, 2**20), 0.1, np.float32)
        rows[1, 0] = 100
        n, x = 2**20, float(np.float32(0.1))
        cosine = ((n - 1) * x**2 + 100 * x) / np.sqrt(n * x**2 * ((n - 1) * x**2 + 1e4))
        z = principal_directions(rows, 1)
        assert z.dtype == np.float64
        assert z[0] @ z[1] == pytest.approx(cosine, abs=1e-13)

    def test_no_copy_in_double_precision(self):
        import tracemalloc

        rows = np.random.default_rng(0).normal(size=(4, 2**21)).astype(np.float32)
        tracemalloc.start()
        principal_directions(rows)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < rows.nbytes / 2

    @BOTH
    def test_input_unmodified_and_any_sequence(self, is_centred):
        rows = random_rows()
        found = principal_directions(rows, is_centred=is_centred)
        assert (rows == random_rows()).all()
        assert (principal_directions(rows.tolist(), is_centred=is_centred) == found).all()
        assert principal_directions(np.array([[100, -128], [1, 0]], np.int8)).shape[0] == 2


class TestDegenerate:
    def test_single_row(self):
        assert principal_directions([[3.0, 4.0]]).tolist() == [[1.0]]
        assert principal_directions([[3.0, 4.0]], is_centred=True).tolist() == [[0.0]]

    @pytest.mark.parametrize("explained_variance", [0.5, 1])
    def test_equal_rows(self, explained_variance):
        rows = np.outer([1.0, 2.0, 0.3], random_rows(1)[0])
        np.testing.assert_allclose(principal_directions(rows, explained_variance), np.ones((3, 1)))
        assert principal_directions(rows, explained_variance, is_centred=True).tolist() == [[0.0]] * 3

    @BOTH
    def test_zeros(self, is_centred):
        assert principal_directions(np.zeros((3, 5)), is_centred=is_centred).tolist() == [[0.0]] * 3

    def test_a_row_of_zeros_stays_zeros(self):
        # rows (1, 0), (0, 0); without the mean (½, 0) they are ±½
        assert principal_directions([[2.0, 0.0], [0.0, 0.0]]).tolist() == [[1.0], [0.0]]
        found = principal_directions([[2.0, 0.0], [0.0, 0.0]], is_centred=True)
        np.testing.assert_allclose(found, [[0.5], [-0.5]])

    @pytest.mark.parametrize(
        ("rows", "explained_variance", "sentence"),
        [
            (
                np.array([[1, 2], [3, np.nan]]),
                0.9,
                r"^rows has nan in row 1, column 1; entries must be finite, not NaN or infinite$",
            ),
            (np.array([[1, 2], [-np.inf, 3]], np.float32), 0.9, r"^rows has -inf in row 1, column 0"),
            ([[1.0, np.nan]], 0.9, r"^rows has nan in row 0, column 1; entries must be finite, not NaN or infinite$"),
            (np.ones(3), 0.9, r"^rows has shape \(3,\)"),
            (np.ones((0, 3)), 0.9, r"^rows has shape \(0, 3\); it must have one row or more and one column or more$"),
            (np.ones((3, 0)), 0.9, r"^rows has shape \(3, 0\)"),
            (np.array([["a"]]), 0.9, r"^rows has entries of type <U1; it must be a table of numbers$"),
            ([[1.0], [1.0, 2.0]], 0.9, r"^rows has an entry that is not a number"),
            (np.eye(2), 0, r"^explained_variance is 0; it must be above 0 and at most 1$"),
            (np.eye(2), 1.1, r"^explained_variance is 1.1; it must be above 0 and at most 1$"),
            (np.eye(2), np.nan, r"^explained_variance is nan"),
        ],
    )
    def test_bad_input(self, rows, explained_variance, sentence):
        with pytest.raises(UserError, match=sentence):
            principal_directions(rows, explained_variance)
