"""Every registered policy with the kernels interpreted does what it does with their references."""

import numpy as np
import pytest

from jkv.policies import names
from models import run
from pallas_kernels.dispatch import Implementation
from test_policies import LENGTHS, model_of, prompts, small

NEW = 9  # two compactions after the prompt's
QUICK = {"h2o", "gkv"}
KERNELS = Implementation("triton", elsewhere=("xla",), interpret=True)


# A batch, and one row alone, which has kernels of its own; by default policies that together use most kernels.
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *(pytest.param(name, LENGTHS, marks=() if name in QUICK else pytest.mark.slow) for name in names()),
        ("snapkv", LENGTHS[1:2]),
    ],
)
def test_kernels_keep_and_read_what_their_references_do(name, lengths):
    kind = "qwen2-3"  # a group that is no power of two
    changes = {"interval": 4}
    expected, found = (
        run(model_of(kind), small(name, **changes), prompts(*lengths), NEW, **options)
        for options in ({}, {"implementation": KERNELS})
    )
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4, rtol=0)
    assert len(found.kept) == len(expected.kept)
    for ours, theirs in zip(found.kept, expected.kept, strict=True):
        np.testing.assert_array_equal(ours[2], theirs[2])
