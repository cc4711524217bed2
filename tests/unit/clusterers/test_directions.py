"""Principal components of rows, from their products."""

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import normalize

from shoal.clusterers import directions
from shoal.clusterers.directions import principal_directions
from shoal.errors import UserError

BOTH = pytest.mark.parametrize("centred", [False, True], ids=["as printed", "centred"])


def drawn(rows=12, columns=40, seed=0):
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

    def test_share_of_equal_eigenvalues(self):
        # five orthogonal rows: five eigenvalues of 1, so three have exactly 0.6 of their sum
        assert [principal_directions(np.eye(5), share).shape[1] for share in (0.2, 0.6, 0.61, 1)] == [1, 3, 4, 5]
        assert principal_directions(np.eye(5), 1, is_centred=True).shape == (5, 4)


class TestFacts:
    def test_as_printed_products_are_cosines(self):
        z = principal_directions(drawn(), 1)
        np.testing.assert_allclose(z @ z.T, cosine_similarity(drawn()), atol=1e-12)

    def test_centred_distances_are_those_of_unit_rows(self):
        z = principal_directions(drawn(), 1, is_centred=True)
        squares = ((z[:, None] - z[None]) ** 2).sum(-1)
        np.testing.assert_allclose(squares, 2 - 2 * cosine_similarity(drawn()), atol=1e-12)
        np.testing.assert_allclose(z.mean(0), 0, atol=1e-14)

    @pytest.mark.parametrize("share", [0.3, 0.8, 0.95])
    def test_centred_is_textbook_pca(self, share):
        found = principal_directions(drawn(), share, is_centred=True)
        expected = PCA(share, svd_solver="full").fit_transform(normalize(drawn()))
        np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-10)

    @pytest.mark.parametrize("share", [0.3, 0.8, 0.95])
    def test_as_printed_is_the_singular_value_decomposition(self, share):
        left, values, _ = np.linalg.svd(normalize(drawn()), full_matrices=False)
        count = np.flatnonzero(np.cumsum(values**2) >= share * 12)[0] + 1  # unit rows: squares sum to their number
        np.testing.assert_allclose(
            np.abs(principal_directions(drawn(), share)), np.abs(left * values)[:, :count], atol=1e-10
        )

    @BOTH
    def test_the_entry_farthest_from_zero_is_positive(self, centred):
        z = principal_directions(drawn(), 1, centred)
        assert (z[np.abs(z).argmax(0), np.arange(z.shape[1])] > 0).all()

    @BOTH
    @pytest.mark.parametrize("factor", [7.0, 1e-200, 1e200])
    def test_lengths_do_not_matter(self, centred, factor):
        rows = drawn()
        expected = principal_directions(rows, 0.9, centred)
        rows[3] *= factor
        np.testing.assert_allclose(principal_directions(rows, 0.9, centred), expected, atol=1e-12)

    @BOTH
    def test_rows_are_permuted_with_their_components(self, centred):
        order = np.random.default_rng(1).permutation(12)
        expected = principal_directions(drawn(), 0.9, centred)[order]
        np.testing.assert_allclose(principal_directions(drawn()[order], 0.9, centred), expected, atol=1e-12)

    @BOTH
    def test_blocks_change_nothing(self, centred, monkeypatch):
        expected = principal_directions(drawn(), 0.9, centred)
        monkeypatch.setattr(directions, "_COLUMNS", 7)  # 40 columns: five blocks and a rest
        np.testing.assert_allclose(principal_directions(drawn(), 0.9, centred), expected, atol=1e-13)

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
    def test_input_unmodified_and_any_sequence(self, centred):
        rows = drawn()
        found = principal_directions(rows, is_centred=centred)
        assert (rows == drawn()).all()
        assert (principal_directions(rows.tolist(), is_centred=centred) == found).all()
        assert principal_directions(np.array([[100, -128], [1, 0]], np.int8)).shape[0] == 2


class TestDegenerate:
    def test_single_row(self):
        assert principal_directions([[3.0, 4.0]]).tolist() == [[1.0]]
        assert principal_directions([[3.0, 4.0]], is_centred=True).tolist() == [[0.0]]

    @pytest.mark.parametrize("share", [0.5, 1])
    def test_equal_rows(self, share):
        rows = np.outer([1.0, 2.0, 0.3], drawn(1)[0])
        np.testing.assert_allclose(principal_directions(rows, share), np.ones((3, 1)))
        assert principal_directions(rows, share, is_centred=True).tolist() == [[0.0]] * 3

    @BOTH
    def test_zeros(self, centred):
        assert principal_directions(np.zeros((3, 5)), is_centred=centred).tolist() == [[0.0]] * 3

    def test_a_row_of_zeros_stays_zeros(self):
        # rows (1, 0), (0, 0); with the mean (½, 0) taken off they are ±½
        assert principal_directions([[2.0, 0.0], [0.0, 0.0]]).tolist() == [[1.0], [0.0]]
        found = principal_directions([[2.0, 0.0], [0.0, 0.0]], is_centred=True)
        np.testing.assert_allclose(found, [[0.5], [-0.5]])

    @pytest.mark.parametrize(
        ("rows", "share", "sentence"),
        [
            (
                np.array([[1, 2], [3, np.nan]]),
                0.9,
                r"^rows has nan in row 1, column 1; entries must be finite, not NaN or infinite$",
            ),
            (np.array([[1, 2], [-np.inf, 3]], np.float32), 0.9, r"^rows has -inf in row 1, column 0"),
            ([[1.0, np.nan]], 0.9, r"^rows has nan in row 0, column 1; entries must be finite, not NaN or infinite$"),
            (np.ones(3), 0.9, r"^rows has shape \(3,\)"),
            (np.ones((0, 3)), 0.9, r"^rows has shape \(0, 3\); it must have a row for each client, one at least"),
            (np.ones((3, 0)), 0.9, r"^rows has shape \(3, 0\)"),
            (np.array([["a"]]), 0.9, r"^rows holds entries of type <U1; it must be a table of numbers$"),
            ([[1.0], [1.0, 2.0]], 0.9, r"^rows holds something that is not a number"),
            (np.eye(2), 0, r"^share is 0; it must be above 0 and at most 1$"),
            (np.eye(2), 1.1, r"^share is 1.1; it must be above 0 and at most 1$"),
            (np.eye(2), np.nan, r"^share is nan"),
        ],
    )
    def test_bad_input(self, rows, share, sentence):
        with pytest.raises(UserError, match=sentence):
            principal_directions(rows, share)
