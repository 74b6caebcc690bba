"""Every public operation of the installed SDK, called; ``python -m tests.tinker.operations`` writes the results.

It needs PYTHONPATH=benchmarks.

The list is the SDK's own: the public methods of its clients that are not deprecated, its losses, and the options of its
sampling request. docs/tinker.md has the table that is made from the results.
"""

import inspect
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import torch

import tinker
from tests.tinker.served import served
from tests.tinker.tiny import write_model
from tinker import types

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tinker_operations.json"

LOCAL = {"get_telemetry", "get_console_url", "on_queue_state_change", "create", "from_sampler_handle"}
"""Methods that ask the service nothing of their own."""

REFUSED = (tinker.TinkerError, RuntimeError)


def listed():
    """Names of the SDK's operations."""
    names = []
    for name in ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"):
        client = getattr(tinker, name, None)
        for method, function in inspect.getmembers(client):
            public = callable(function) and not method.startswith("_") and not method.endswith("_async")
            if public and not hasattr(function, "__deprecated__") and method not in LOCAL:
                names.append(f"{name}.{method}")
    names += [f"loss_fn {name}" for name in get_args(types.LossFnType)]
    plain = {"prompt", "sampling_params", "num_samples", "sampling_session_id", "seq_id", "type"}
    return names + [f"sample {name}" for name in types.SampleRequest.model_fields if name not in plain]


def datum(ids, **inputs):
    """Next-token targets."""
    loss_inputs = {"target_tokens": ids[1:], **{name: [value] * (len(ids) - 1) for name, value in inputs.items()}}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=loss_inputs)


def made(client):
    """A client; before 0.37 there was no future of one."""
    return client.result() if hasattr(client, "result") else client


def minus_sum(_, logprobs):
    """A custom loss."""
    return -sum(each.sum() for each in logprobs), {}


def calls(url, model):
    """A function for each operation; ``model`` is the folder of the model called ``tiny``."""
    service = tinker.ServiceClient(base_url=url)
    rest, ids = service.create_rest_client(), [72, 101, 108, 108, 111]
    admin = getattr(tinker, "AdminClient", None)
    trainer = made(service.create_lora_training_client(base_model="tiny", rank=2))
    sampler = made(trainer.save_weights_and_get_sampling_client())
    state = trainer.save_state("state").result().path
    run = state.removeprefix("tinker://").split("/")[0]
    external = trainer.save_weights_external("whole").result().path
    session = run.partition(":")[0]
    prompt, params = types.ModelInput.from_ints(ids), types.SamplingParams(max_tokens=2)
    target = types.TensorData.from_torch(torch.zeros(len(ids) - 1, 1, dtype=torch.int64))

    def sample(**options):
        return sampler.sample(prompt, 1, params, **options)

    def saved(name):
        trainer.save_state(name).result()
        return f"tinker://{run}/weights/{name}"

    def stability():
        recording = made(trainer.save_weights_and_get_sampling_client(record_stability_info=True))
        return recording.sample(prompt, 1, params)

    def loss(name):
        wanted = {"cross_entropy": {"weights": 1.0}, "custom": {"weights": 1.0}}
        inputs = wanted.get(name, {"logprobs": -1.0, "advantages": 1.0})
        inputs |= {"sequence_ratio_mask": 1.0} if name == "gspo" else {}
        client = made(service.create_lora_training_client(base_model="tiny", rank=2))
        return client.forward_backward([datum(ids, **inputs)], name)

    def admins():
        return (
            admin() if admin is None or "base_url" not in inspect.signature(admin).parameters else admin(base_url=url)
        )

    ones = [datum(ids, weights=1.0)]
    found = {
        "ServiceClient.close": lambda: tinker.ServiceClient(base_url=url).close("success"),
        "ServiceClient.copy_weights": lambda: tinker.ServiceClient(base_url=url, project_id="p").copy_weights(state),
        "ServiceClient.create_custom_loss": lambda: service.create_custom_loss(
            lambda logprobs, weights: (-(logprobs * weights).sum(), {}), {"logprobs": 1, "weights": 1}
        ),
        "ServiceClient.create_lora_training_client": lambda: service.create_lora_training_client("tiny", rank=2),
        "ServiceClient.create_rest_client": service.create_rest_client,
        "ServiceClient.create_sampling_client": lambda: service.create_sampling_client(base_model="tiny"),
        "ServiceClient.create_training_client_from_state": lambda: service.create_training_client_from_state(state),
        "ServiceClient.create_training_client_from_state_with_optimizer": lambda: (
            service.create_training_client_from_state_with_optimizer(state)
        ),
        "ServiceClient.get_server_capabilities": service.get_server_capabilities,
        "TrainingClient.create_sampling_client": lambda: trainer.create_sampling_client(
            trainer.save_weights_for_sampler("again").result().path
        ),
        "TrainingClient.forward": lambda: trainer.forward(ones, "cross_entropy"),
        "TrainingClient.forward_backward": lambda: trainer.forward_backward(ones, "cross_entropy"),
        "TrainingClient.forward_backward_custom": lambda: trainer.forward_backward_custom(ones, minus_sum),
        "TrainingClient.get_info": trainer.get_info,
        "TrainingClient.get_tokenizer": trainer.get_tokenizer,
        "TrainingClient.optim_step": lambda: trainer.optim_step(types.AdamParams()),
        "TrainingClient.save_state": lambda: trainer.save_state("other"),
        "TrainingClient.save_weights_and_get_sampling_client": trainer.save_weights_and_get_sampling_client,
        "TrainingClient.save_weights_external": lambda: trainer.save_weights_external("more"),
        "TrainingClient.save_weights_for_sampler": lambda: trainer.save_weights_for_sampler("named"),
        "SamplingClient.compute_logprobs": lambda: sampler.compute_logprobs(prompt),
        "SamplingClient.get_base_model": sampler.get_base_model,
        "SamplingClient.get_sampler_handle": sampler.get_sampler_handle,
        "SamplingClient.get_tokenizer": lambda: made(service.create_sampling_client(base_model=str(model)))
            .get_tokenizer(),
        "SamplingClient.sample": sample,
        "RestClient.assign_session_project": lambda: rest.assign_session_project(session, "p"),
        "RestClient.copy_weights": lambda: rest.copy_weights(state, "p"),
        "RestClient.delete_checkpoint": lambda: rest.delete_checkpoint(
            run, saved("gone").removeprefix(f"tinker://{run}/")),
        "RestClient.delete_checkpoint_from_tinker_path": lambda: rest.delete_checkpoint_from_tinker_path(saved("off")),
        "RestClient.export_session_trace": lambda: rest.export_session_trace(session),
        "RestClient.get_external_weights_urls": lambda: rest.get_external_weights_urls(external),
        "RestClient.get_sampler": lambda: rest.get_sampler(f"{session}:sample:0"),
        "RestClient.get_server_capabilities": lambda: rest.get_server_capabilities(),
        "RestClient.get_session": lambda: rest.get_session(session),
        "RestClient.get_training_run": lambda: rest.get_training_run(run),
        "RestClient.get_training_run_by_tinker_path": lambda: rest.get_training_run_by_tinker_path(state),
        "RestClient.get_weights_info_by_tinker_path": lambda: rest.get_weights_info_by_tinker_path(state),
        "RestClient.list_checkpoints": lambda: rest.list_checkpoints(run),
        "RestClient.list_sessions": rest.list_sessions,
        "RestClient.list_training_runs": rest.list_training_runs,
        "RestClient.list_user_checkpoints": rest.list_user_checkpoints,
        "RestClient.publish_checkpoint_from_tinker_path": lambda: rest.publish_checkpoint_from_tinker_path(state),
        "RestClient.set_checkpoint_ttl_from_tinker_path": lambda: rest.set_checkpoint_ttl_from_tinker_path(state, 9999),
        "RestClient.unpublish_checkpoint_from_tinker_path": lambda: rest.unpublish_checkpoint_from_tinker_path(state),
        "RestClient.whoami": rest.whoami,
        "AdminClient.get_audit_log": lambda: admins().get_audit_log(),
        "AdminClient.get_billing_usage": lambda: admins().get_billing_usage(
            datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
        "AdminClient.get_current_checkpoint_storage_usage": lambda: admins().get_current_checkpoint_storage_usage(),
        "sample base_model": lambda: made(service.create_sampling_client(base_model="tiny")).sample(
            prompt, 1, params),
        "sample model_path": lambda: made(service.create_sampling_client(
            model_path=trainer.save_weights_for_sampler("path").result().path)).sample(prompt, 1, params),
        "sample prompt_logprobs": lambda: sample(include_prompt_logprobs=True),
        "sample prompt_logprobs_last_n": lambda: sample(include_prompt_logprobs=True, prompt_logprobs_last_n=2),
        "sample topk_prompt_logprobs": lambda: sample(topk_prompt_logprobs=2),
        "sample topk_sample_logprobs": lambda: sample(topk_sample_logprobs=2),
        "sample target_prompt_logprobs": lambda: sample(target_prompt_logprobs=target),
        "sample prompt_alt_tokens_k": lambda: sample(prompt_alt_tokens_k=2),
        "sample record_stability_info": stability,
    }  # fmt: skip
    return found | {f"loss_fn {name}": lambda name=name: loss(name) for name in get_args(types.LossFnType)}


def results(url, model):
    """Whether each operation is ``served``, or why not in the service's words."""
    known, found = calls(url, model), {}
    for name in listed():
        try:
            answer = known[name]()
            if hasattr(answer, "result"):
                answer.result(60)
            found[name] = "served"
        except REFUSED as refused:
            body = getattr(refused, "body", None)
            said = body["error"] if isinstance(body, dict) else str(refused)
            found[name] = said.removeprefix("Request failed: ").partition(" for self.request_id")[0]
    return found


def main():
    """Write the results of a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        with served(model, Path(folder) / "saved", "--name", "tiny", "--name", str(model)) as (_, url):
            found = results(url, model)
    RESULTS.write_text(json.dumps({"sdk": tinker.__version__, "operations": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
