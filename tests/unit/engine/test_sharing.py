import pytest

from simtrain.engine.sharing import fits, rates


def test_two_alike_share_evenly() -> None:
    assert rates([{0: 1.0}, {0: 1.0}], [1.0, 1.0], {0: 1.0}) == [0.5, 0.5]


def test_who_needs_little_gets_it_all_and_the_rest_is_split() -> None:
    assert rates([{0: 1.0}, {0: 1.0}, {0: 0.2}], [1.0, 1.0, 5.0], {0: 1.0}) == pytest.approx([0.4, 0.4, 1.0])


def test_weights_set_the_proportion() -> None:
    assert rates([{0: 1.0}, {0: 1.0}], [3.0, 1.0], {0: 1.0}) == pytest.approx([0.75, 0.25])


def test_a_bottleneck_elsewhere_leaves_more_for_the_others() -> None:
    """Bertsekas & Gallager's picture: the session through the narrow link frees the wide one."""
    found = rates([{0: 1.0, 1: 1.0}, {0: 1.0}, {1: 1.0}, {1: 1.0}], [1.0] * 4, {0: 1.0, 1: 1.0})
    assert found == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3])


def test_capacity_below_one() -> None:
    assert rates([{7: 1.0}], [1.0], {7: 0.9}) == [0.9]


@pytest.mark.parametrize("count", range(1, 60))
def test_uncontended_is_exactly_one_even_where_the_sum_rounds_up(count: int) -> None:
    assert rates([{0: 1 / count}] * count, [1.0] * count, {0: 1.0}) == [1.0] * count


def test_nothing_used_nothing_slowed() -> None:
    assert rates([], [], {}) == []
    assert rates([{}, {0: 2.0}], [1.0, 1.0], {0: 1.0}) == [1.0, 0.5]


def test_fits_forgives_rounding_only() -> None:
    assert fits(1 + 1e-13)
    assert not fits(1 + 1e-9)
