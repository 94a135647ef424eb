"""One rank of a DCP save, or the load of it: plain torch, gloo on the loopback.

usage: dcp_ranks.py save|load RANK WORLD FILE DIRECTORY VALUE; the ranks meet in FILE, which does not exist yet
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

warnings.filterwarnings("ignore")
action, rank, world, meeting, directory, value = (
    sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], float(sys.argv[6]),
)  # fmt: skip
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
state = {f"rank{rank}": torch.full((256, 1024), value + rank), "shared": torch.full((1000,), value)}
if action == "save":
    dcp.save(state, checkpoint_id=directory)
else:
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    dcp.load(state, checkpoint_id=directory)
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name
dist.destroy_process_group()
