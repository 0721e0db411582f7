"""Every kernel on the GPU against its numpy reference, on its own examples."""

import pytest

from llamagraph.kernels import all_kernels


@pytest.mark.parametrize("name", sorted(n for n, k in all_kernels().items() if k.source))
def test_kernel_meets_its_reference(gpu, name):
    from checks.examples import examples
    from checks.kernels import check_example, title

    for i, example in enumerate(examples(all_kernels()[name])):
        _, fault = check_example(gpu, example)
        assert not fault, f"{title(example.kernel, i)}: {fault}"
