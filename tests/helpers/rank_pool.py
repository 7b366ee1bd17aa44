"""A pool of processes that are the ranks of a process group: they start once and run many functions."""

import multiprocessing
import os
import traceback
import warnings

WORLD = 4


class RankPool:
    """Four ranks with gloo, and meshes over the first of them: of 1, 2 and 3 ranks, "1x2", and "2x2" of all."""

    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(WORLD)]
        self.pipes = [ours for ours, _ in pairs]
        theirs = [pipe for _, pipe in pairs]
        self.launcher = context.Process(target=_launch, args=(theirs, f"file://{folder}/rendezvous"))
        self.launcher.start()
        for pipe in theirs:
            pipe.close()

    def run(self, mesh, function, *args, timeout=120):
        """What ``function(mesh, *args)`` returns on each rank of a mesh; an exception there is raised here.

        With "all" the function runs on all ranks and gets a dict of all meshes.
        """
        count = WORLD if mesh in ("2x2", "all") else mesh
        for pipe in self.pipes[:count]:
            pipe.send((mesh, function, args))
        answers = []
        for pipe in self.pipes[:count]:
            assert pipe.poll(timeout), f"a rank did not answer within {timeout} seconds: the ranks wait for each other"
            answers.append(pipe.recv())
        errors = [text for text, _ in answers if text is not None]
        assert not errors, errors[0]
        return [result for _, result in answers]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
            pipe.close()
        self.launcher.join(20)
        if self.launcher.is_alive():
            self.launcher.kill()
            self.launcher.join()


def _launch(pipes, rendezvous):
    """Import once, then fork: torch alone takes seconds to import."""
    import helpers.sharded  # noqa: F401

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_serve, args=(pipe, i, rendezvous), daemon=True) for i, pipe in enumerate(pipes)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def _serve(pipe, rank, rendezvous):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    warnings.filterwarnings("error", module="lategrad")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in (1, 2, 3)}
    meshes["1x2"] = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard"))
    meshes["2x2"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    while (task := pipe.recv()) is not None:
        mesh, function, args = task
        try:
            torch.manual_seed(0)
            answer = None, function(meshes if mesh == "all" else meshes[mesh], *args)
        except Exception:
            answer = traceback.format_exc(), None
        pipe.send(answer)
    dist.destroy_process_group()
