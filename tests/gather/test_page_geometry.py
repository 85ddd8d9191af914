"""`PageGeometry`: provisional, then frozen; every misuse raises and says what to do."""

import pytest
import torch

from torch_sparse_mla import PageGeometry


def test_use_before_freezing_raises_with_the_remedy():
    for geometry in (PageGeometry(), PageGeometry(64)):
        assert not geometry.frozen
        with pytest.raises(RuntimeError, match=r"is provisional; call freeze\(page_size\)"):
            _ = geometry.page_size
        with pytest.raises(RuntimeError, match="is provisional"):
            geometry.check_cache(torch.zeros(1, 64, 16, dtype=torch.uint8))


def test_a_provisional_size_may_change_and_the_last_one_is_frozen():
    geometry = PageGeometry(64)
    geometry.propose(2_304)
    geometry.freeze()
    assert geometry.frozen and geometry.page_size == 2_304


def test_the_same_size_again_changes_nothing_and_another_raises():
    geometry = PageGeometry(64)
    geometry.freeze(2_304)
    geometry.freeze(2_304)
    geometry.freeze()
    geometry.propose(2_304)
    assert geometry.page_size == 2_304
    for change in (geometry.freeze, geometry.propose):
        with pytest.raises(ValueError, match="got 64; allowed: 2304, which is frozen; make a new PageGeometry"):
            change(64)
    assert geometry.page_size == 2_304


def test_a_cache_of_another_page_size_is_refused():
    geometry = PageGeometry()
    geometry.freeze(8)
    geometry.check_cache(torch.zeros(3, 8, 16, dtype=torch.uint8))
    for shape in ((3, 16, 16), (3, 8)):
        with pytest.raises(ValueError, match=r"allowed: shape \[pages, 8, record_bytes\]"):
            geometry.check_cache(torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("page_size", [0, -4, 2.0, "64"])
def test_refuses_what_is_no_page_size(page_size):
    with pytest.raises(ValueError, match="argument 'page_size'"):
        PageGeometry(page_size)
    with pytest.raises(ValueError, match="argument 'page_size'"):
        PageGeometry().freeze(page_size)


def test_freezing_nothing_raises():
    with pytest.raises(ValueError, match="argument 'page_size': got None"):
        PageGeometry().freeze()
