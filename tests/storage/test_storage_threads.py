"""Threads that share, discard and read at the same time get a correct result or an error.

`make sanitize` also runs this file under the thread sanitizer.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

import storage_ops as so


def test_threads_share_from_one_source(path):
    """At the same time, both see that the source does not share its bytes yet."""
    sources = [torch.full((16,), float(i)) for i in range(1000)]
    results = [[torch.zeros(16) for _ in sources] for _ in range(3)]
    ready = Barrier(4)

    def share(number):
        ready.wait()
        op = torch.ops.storage_ops.share_storage.default
        for dst, src in zip(results[number], sources, strict=True):
            op(dst, src)

    def read():
        ready.wait()
        return all((src + 0).sum() == 16 * i for i, src in enumerate(sources))

    with ThreadPoolExecutor(4) as threads:
        reader = threads.submit(read)
        for done in [threads.submit(share, number) for number in range(3)]:
            done.result()
        assert reader.result()
    for tensors in [*results, sources]:
        assert all((t == i).all() for i, t in enumerate(tensors))


def test_threads_discard_and_share_the_same_storage(path):
    dst, src = torch.ones(64), torch.full((64,), 2.0)
    ready = Barrier(3)

    def work(number):
        ready.wait()
        for _ in range(1000):
            if number:
                so.share_storage(dst, src)
            else:
                so.discard_storage(dst)
            so.is_discarded(dst)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, number) for number in range(3)]:
            done.result()
    so.share_storage(dst, src)
    assert torch.equal(dst, src)


def test_threads_mix_all_operations(path):
    """Each tensor has one value in all elements, or has no bytes."""
    tensors = [torch.full((16,), float(i)) for i in range(6)]
    operations = [
        so.share_storage,
        lambda a, _: so.discard_storage(a),
        lambda a, _: so.share_storage(a, torch.full((16,), 6.0)),
        lambda a, _: so.share_storage(torch.empty(16), a),
        lambda a, _: so.is_discarded(a),
        lambda a, _: (a.detach(), a.untyped_storage().nbytes()),
    ]
    ready = Barrier(4)

    def work(seed):
        draw = random.Random(seed)
        ready.wait()
        for _ in range(300):
            try:
                draw.choice(operations)(*draw.sample(tensors, 2))
            except RuntimeError as error:
                assert any(word in str(error) for word in ("discarded", "cycle", "bytes")), error

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, random.random()) for _ in range(4)]:
            done.result()
    for t in tensors:
        assert so.is_discarded(t) or ((t == t[0]).all() and t[0] in range(7))
    for t in tensors:
        so.share_storage(t, torch.full((16,), 7.0))
    assert all((t == 7).all() for t in tensors)
