"""One rank of a training that spans machines: plain torch, gloo over the network.

usage: dcp_node.py RANK WORLD HOST PORT; then lines `save VALUE DIRECTORY` or `load VALUE DIRECTORY` on standard input.
Each is answered with `done`, and so is the start.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

warnings.filterwarnings("ignore")
rank, world = map(int, sys.argv[1:3])
os.environ.update(MASTER_ADDR=sys.argv[3], MASTER_PORT=sys.argv[4], GLOO_SOCKET_IFNAME="eth0")
dist.init_process_group("gloo", rank=rank, world_size=world)
print("done", flush=True)
for line in sys.stdin:
    action, text, directory = line.split()
    value = float(text)
    wanted = {f"rank{rank}": torch.full((256, 64), value + rank), "shared": torch.full((1000,), value)}
    if action == "save":
        dcp.save(wanted, checkpoint_id=directory)
    else:
        state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        dcp.load(state, checkpoint_id=directory)
        assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    print("done", flush=True)
dist.destroy_process_group()
