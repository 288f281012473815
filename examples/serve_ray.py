r"""examples/serve.py on several GPUs: Ray Serve starts a replica for each, and a chat stays on its own.

    pip install "ray[serve]>=2.60"
    python examples/serve_ray.py --model Qwen/Qwen3-1.7B --device cuda --dtype bfloat16 --replicas 4
    curl -N localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -H 'x-session-id: anna' -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

Ray's `ConsistentHashRouter` sends all requests with the same `x-session-id` to one replica. There the
chat's next turn computes its new tokens only. A request without the header, or whose replica has no
free row, goes to any replica.
"""

import argparse

import torch
from common import server_parser
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from hf_static_kv.testing import load_model

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def build(args: argparse.Namespace) -> serve.Application:
    def build_replica() -> FastAPI:
        """Runs in each replica. Ray shows it one GPU."""
        from serve import build_app  # examples/serve.py; `serve` of this module is Ray's

        dtype = getattr(torch, args.dtype)
        model, tokenizer = load_model(args.model, device=args.device, dtype=dtype)
        app = build_app(model, tokenizer, max_rows=args.rows)

        @app.get("/replica")
        def replica() -> str:
            return serve.get_replica_context().replica_id.unique_id

        return app

    has_gpu = args.device.startswith("cuda")
    replicas = serve.deployment(
        serve.ingress(build_replica)(),
        name="chat",
        num_replicas=args.replicas,
        max_ongoing_requests=args.rows,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(has_gpu)},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    return replicas.bind()


def main() -> None:
    parser = server_parser()
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    serve.start(http_options={"port": args.port})
    serve.run(build(args), blocking=True)


if __name__ == "__main__":
    main()
