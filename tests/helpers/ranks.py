"""A pool of processes that are the ranks of a process group: they start once and run many functions."""

import multiprocessing
import os
import traceback


class Ranks:
    """Four ranks with gloo, and meshes over some of them: ``MESHES[n]`` of n ranks, ``MESHES["2x2"]`` of all."""

    def __init__(self, folder):
        context = multiprocessing.get_context("forkserver")
        self.pipes, self.processes = [], []
        for rank in range(4):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, f"file://{folder}/rendezvous"), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, mesh, function, *args, timeout=120):
        """What ``function(mesh, *args)`` returns on each rank of a mesh; an exception there is raised here."""
        count = 4 if mesh == "2x2" else mesh
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
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe, rank, rendezvous):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=4)
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in (1, 2, 3)}
    meshes["2x2"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    while True:
        try:
            mesh, function, args = pipe.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            pipe.send((None, function(meshes[mesh], *args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
