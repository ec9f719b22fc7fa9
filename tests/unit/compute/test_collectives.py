# SPDX-License-Identifier: Apache-2.0
"""Collectives with known answers, and the counters of the network."""

import torch
import torch.distributed as dist

from mprecipes.compute.collectives import network_counters, network_problems, try_collectives
from mprecipes.compute.ranks import Ranks

SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm OutSegs RetransSegs
Tcp: 1 1000 7
"""


def test_one_process_has_nobody_to_ask():
    """Nothing is communicated, nothing is answered."""
    assert try_collectives(Ranks(), torch.device("cpu"), 1.0) == []


def test_a_wrong_answer_is_told_with_the_right_one(tmp_path):
    """One process that answers for two: the sum is not that of ranks 0 and 1, and the rest waits.

    Right answers of two processes, and one that hangs, are in tests/resume/test_sabotage.py.
    """
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        (answer,) = try_collectives(Ranks(0, 2), torch.device("cpu"), 5.0)
    finally:
        dist.destroy_process_group()
    assert (answer.name, answer.hangs) == ("all_reduce", False)
    assert answer.problem == (
        "gave 1.0000152587890625 to 1.0000152587890625, not 3.0000457763671875"
    )
    assert answer.seconds < 5


def test_counters_are_read_where_they_are(tmp_path):
    """TCP from /proc/net/snmp and InfiniBand by port; nothing where there is neither."""
    (tmp_path / "snmp").write_text(SNMP)
    port = tmp_path / "ib" / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    (port / "symbol_error").write_text("3\n")
    (port / "link_downed").write_text("unreadable\n")
    assert network_counters(tmp_path / "snmp", tmp_path / "ib") == {
        "tcp_sent": 1000, "tcp_retransmitted": 7, "mlx5_0/1 symbol_error": 3,
    }  # fmt: skip
    assert network_counters(tmp_path / "none", tmp_path / "none") == {}


def test_what_rose_too_much_is_named():
    """1 % of the segments and at least 100; of InfiniBand errors a single one."""
    before = {"tcp_sent": 0, "tcp_retransmitted": 0, "mlx5_0/1 symbol_error": 3}
    quiet = {"tcp_sent": 10_000, "tcp_retransmitted": 99, "mlx5_0/1 symbol_error": 3}
    assert network_problems(before, quiet) == []
    assert network_problems(before, {"tcp_sent": 99_000, "tcp_retransmitted": 900}) == []
    assert network_problems(
        before, {"tcp_sent": 9_000, "tcp_retransmitted": 200, "mlx5_0/1 symbol_error": 4}
    ) == ["200 of 9000 TCP segments were sent again", "mlx5_0/1 symbol_error rose by 1"]
