"""Bodies of the Tinker SDK: requests in protobuf and JSON, results in protobuf.

The message classes are those of the installed package ``tinker``. A JSON field or value that would change a result and
is not served is refused in words; labels of the client (tags, project, versions) are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from logitless.errors import RefusedError
from logitless.installed import optional
from logitless.tinker.losses import INPUTS, checked_config

MAX_BODY_BYTES = 64 << 20
"""Of a request, compressed or not."""

MAX_TARGETS = 64
"""Of a position."""

MAX_CELLS = 1 << 22
"""Targets of all positions of a request: as many as fit into a body, with a weight each."""

MAX_FIELDS = 1 << 18
"""Of a request in protobuf, those of messages within it counted; the SDK's largest has a tenth."""

MAX_PARTS = 1 << 16
"""Objects and lists of a request in JSON."""

_DTYPES = {"DTYPE_FLOAT32": np.float32, "DTYPE_INT64": np.int64, "DTYPE_INT32": np.int32}


def messages() -> Any:
    """The SDK's module of protobuf messages.

    Raises:
        UnavailableError: the package is not installed.
    """
    needed = "the package tinker, whose messages the service reads"
    return optional("tinker.proto.tinker_public_pb2", extra="tinker", needed=needed)


def inflated(body: bytes, encoding: str) -> bytes:
    """The body after undoing its Content-Encoding.

    Raises:
        RefusedError: an unknown encoding, a broken body, or more than ``MAX_BODY_BYTES``.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RefusedError(415, f"Content-Encoding {encoding!r}: the service reads zstd and plain bodies")
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain = reader.read(MAX_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise RefusedError(400, f"a body that is not zstd: {error}") from error
    if len(plain) > MAX_BODY_BYTES:
        raise RefusedError(413, f"more than {MAX_BODY_BYTES} bytes")
    return bytes(plain)


# --- JSON


class Message(BaseModel):
    """A JSON request. Fields that it does not name are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    max_bytes: ClassVar[int] = 1 << 16
    type: str | None = None


M = TypeVar("M", bound=Message)


def parsed(kind: type[M], body: bytes) -> M:
    """A JSON body as a request.

    Raises:
        RefusedError: names each wrong field.
    """
    if len(body) > kind.max_bytes:
        raise RefusedError(422, f"{len(body)} bytes: at most {kind.max_bytes} are read here")
    if body.count(b"{") + body.count(b"[") > MAX_PARTS or body.count(b",") > MAX_CELLS:  # before objects are made
        raise RefusedError(422, f"at most {MAX_PARTS} objects and lists and {MAX_CELLS} values are read here")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = {".".join(map(str, each["loc"])) or "body": each for each in error.errors()}
        said = {
            name: "not served" if each["type"] == "extra_forbidden" else each["msg"].removeprefix("Value error, ")
            for name, each in wrong.items()
        }
        raise RefusedError(422, "; ".join(f"{name}: {what}" for name, what in [*said.items()][:8])) from error


def _only(*allowed: object, why: str = "") -> BeforeValidator:
    """A field in which only these values are served."""

    def check(value: object) -> object:
        if value not in allowed:
            raise ValueError(f"not served with {value!r}{why}")
        return value

    return BeforeValidator(check)


Off = Annotated[Any, _only(None, False, 0, [], "")]
"""A feature that can only be left out."""


class CreateSession(Message):
    """``create_session``."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Message):
    """``session_heartbeat``."""

    session_id: str


class Optimizer(Message):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class LoraConfig(Message):
    """The adapter of a model."""

    rank: int = Field(ge=1, le=512)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Message):
    """``create_model``."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig = LoraConfig(rank=32)
    optimizer_config: Optimizer = Optimizer()


class OfModel(Message):
    """``get_info``, and base of all requests of a model."""

    model_id: str


class AdamParams(Message):
    """Adam's settings for one step, with the service's defaults."""

    learning_rate: float = Field(0.0001, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=1e-30, allow_inf_nan=False)  # of 0 a weight without gradient becomes 0/0
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStep(OfModel):
    """``optim_step``."""

    seq_id: int = Field(ge=1)
    adam_params: AdamParams = AdamParams()


Ttl = Annotated[int, Field(strict=True, ge=1, le=10 * 365 * 24 * 3600)]
"""Seconds, at most ten years."""


class SetTtl(Message):
    """``ttl``."""

    ttl_seconds: Ttl | None = None


class SaveWeights(OfModel):
    """``save_weights``, ``save_weights_for_sampler`` and ``save_weights_external``."""

    seq_id: int = Field(ge=1)
    path: str | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    kind: Annotated[Any, _only("snapshot", why=": save a snapshot after each step")] = "snapshot"
    age_encryption_recipients: list[str] | None = Field(None, max_length=10)


class LoadWeights(Message):
    """``load_weights``: into a model, or as the first request of a new one."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: Off = None


class CreateSamplingSession(Message):
    """``create_sampling_session``."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


Count = Annotated[int, Field(ge=0, lt=2**31)]
"""A number that fits into every integer type below."""


class TextChunk(Message):
    """Tokens of a prompt; images and audio are not served."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Count]


class ModelInput(Message):
    """A prompt."""

    chunks: list[TextChunk]

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(Message):
    """How to sample."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = None
    stop: str | list[str] | list[Count] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)


class TokenTensor(Message):
    """Token ids [rows, K], dense or as sparse CSR."""

    data: list[Annotated[int, Field(ge=-1, lt=2**31)]]
    dtype: Literal["int64"]
    shape: list[Count] = Field(min_length=2, max_length=2)
    sparse_crow_indices: list[Count] | None = None
    sparse_col_indices: list[Count] | None = None


NumTop = Annotated[int, Field(ge=0, le=MAX_TARGETS)]


class Sample(Message):
    """``asample``."""

    max_bytes = MAX_BODY_BYTES
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(1, ge=1, le=4096)
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    base_model: Off = None
    model_path: Off = None
    topk_prompt_logprobs: NumTop = 0
    topk_sample_logprobs: NumTop = 0
    target_prompt_logprobs: TokenTensor | None = None
    prompt_alt_tokens_k: Off = 0
    record_stability_info: Annotated[
        Any, _only(None, False, why=", for the formula of stable_reinforce is not published: name another loss_fn")
    ] = None


class RetrieveFuture(Message):
    """``retrieve_future`` and ``cancel_future``."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(Message):
    """``weights_info``."""

    tinker_path: str


class Anything(Message):
    """A request whose fields have no effect: ``client/config``, ``telemetry``, ``finish``."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


# --- protobuf


@dataclass(frozen=True)
class Datum:
    """One sequence with targets.

    Args:
        tokens: [L] the model's input.
        targets: [L, K] of each position; given already shifted.
        inputs: inputs of the loss by name, [L, K] each.
        is_flat: whether the request had targets [L] rather than [L, 1].
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: dict[str, np.ndarray]
    is_flat: bool


@dataclass(frozen=True)
class ForwardBackward:
    """The data of ``forward_backward``; ``config`` is of ``checked_config``."""

    loss: str
    config: dict[str, float]
    forward_only: bool
    data: tuple[Datum, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)


def forward_backward_request(body: bytes) -> Any:
    """The SDK's ``ForwardBackwardRequest``, for ``forward_backward`` to read.

    Raises:
        RefusedError: another message, or more than ``MAX_FIELDS`` fields.
    """
    from google.protobuf.message import DecodeError

    message = messages().ForwardBackwardRequest()
    try:
        _counted(memoryview(body), message.DESCRIPTOR, MAX_FIELDS)
    except (IndexError, ValueError, RecursionError) as error:
        raise RefusedError(400, f"a body that is no ForwardBackwardRequest: {error}") from error
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RefusedError(400, f"a body that is no ForwardBackwardRequest: {error}") from error
    return message


def _counted(raw: memoryview, descriptor: Any, left: int) -> int:
    """``left`` minus the number of fields of a message in the wire format, counted before it is parsed.

    A body with a message for every two bytes would take a hundred times its size once parsed.

    Raises:
        RefusedError: more than ``left`` fields.
        IndexError, ValueError: not a message.
    """

    def number(at: int) -> tuple[int, int]:
        """A varint, and where it ends."""
        value = shift = 0
        while raw[at] & 128:
            value, shift, at = value | (raw[at] & 127) << shift, shift + 7, at + 1
            if shift > 63:
                raise ValueError("a number of more than 64 bits")
        return value | raw[at] << shift, at + 1

    at, fields = 0, descriptor.fields_by_number
    while at < len(raw):
        left -= 1
        if left < 0:
            raise RefusedError(413, f"more than {MAX_FIELDS} fields of protobuf: send less at once")
        tag, at = number(at)
        kind = tag & 7
        if kind == 2:
            size, at = number(at)
            field = fields.get(tag >> 3)
            if size > len(raw) - at:
                raise ValueError("a field that ends behind the body")
            if field is not None and field.message_type is not None:
                left = _counted(raw[at : at + size], field.message_type, left)
            at += size
        elif kind == 0:
            _, at = number(at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("a field of an unknown kind")
    return left


def num_tokens(message: Any) -> int:
    """Upper bound of the tokens that a request reads, once for each target of a position; its data are not read.

    ``forward_backward`` finds shapes that do not fit the data.
    """
    total = 0
    for datum in message.data:
        length = sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
        inputs = datum.loss_fn_inputs
        shape: list[int] = list(inputs["target_tokens"].shape) if "target_tokens" in inputs else []
        total += length * (max(1, min(shape[1], MAX_TARGETS)) if len(shape) == 2 else 1)
    return total


def forward_backward(message: Any, *, vocabulary: int, limit: int | None) -> ForwardBackward:
    """The data of a request.

    Args:
        message: of ``forward_backward_request``.
        vocabulary: number of tokens of the model.
        limit: its number of positions, or None.

    Raises:
        RefusedError: data that do not fit together; names the datum.
        InputError: of ``checked_config``.
    """
    if not message.data:
        raise RefusedError(400, "a request without data")
    given: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        given[key] = value.text if value.WhichOneof("value") == "text" else value.number
    config = checked_config(message.loss_fn, given)
    wanted = INPUTS[message.loss_fn]
    data, cells = list[Datum](), 0
    for index, each in enumerate(message.data):
        try:
            data.append(_datum(each, wanted, vocabulary, limit))
            cells += data[-1].targets.size
            if cells > MAX_CELLS:
                raise ValueError(f"more than {MAX_CELLS} targets with those before: send less at once")
        except ValueError as error:
            raise RefusedError(400, f"datum {index}: {error}") from error
    if message.loss_fn != "cross_entropy" and any(datum.targets.shape[1] > 1 for datum in data):
        raise RefusedError(400, f"{message.loss_fn} with several targets at a position: cross_entropy alone has them")
    return ForwardBackward(message.loss_fn, config, message.forward_only, tuple(data))


def _datum(message: Any, wanted: Sequence[str], vocabulary: int, limit: int | None) -> Datum:
    parts = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise ValueError(f"a chunk {chunk.WhichOneof('chunk')}: encoded_text alone is served")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32)))
    tokens = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    check_tokens(tokens, vocabulary)
    if not len(tokens) or (limit is not None and len(tokens) > limit):
        raise ValueError(f"{len(tokens)} tokens: from 1 to the model's {limit} positions are needed")
    for name, tensor in message.loss_fn_inputs.items():  # before a sparse one is made dense
        shape = tuple(tensor.shape)
        if len(shape) == 2 and (
            shape[0] != len(tokens) or shape[1] > MAX_TARGETS or len(tokens) * shape[1] > MAX_CELLS
        ):
            raise ValueError(
                f"{name} of shape {shape} beside {len(tokens)} tokens: one row a token is needed, of at most "
                f"{MAX_TARGETS} targets, and at most {MAX_CELLS} in all"
            )
    given = {name: _tensor(tensor) for name, tensor in message.loss_fn_inputs.items()}
    missing = {"target_tokens", *wanted} - {"weights"} - given.keys()
    unknown = given.keys() - {"target_tokens", *wanted}
    if missing or unknown:
        raise ValueError(
            f"loss_fn_inputs {', '.join(sorted(given)) or 'none'}: target_tokens, {', '.join(wanted)} are read"
        )
    targets = given.pop("target_tokens")
    shape, is_flat = targets.shape, targets.ndim == 1
    if targets.ndim not in (1, 2) or shape[0] != len(tokens) or targets.size == 0:
        raise ValueError(f"target_tokens of shape {shape} beside {len(tokens)} tokens: one row a token is needed")
    if not np.issubdtype(targets.dtype, np.integer):
        raise ValueError("target_tokens that are no integers")
    check_tokens(targets, vocabulary, "target_tokens", "; weight or advantage 0 leaves a token out")
    if "weights" in wanted:
        given.setdefault("weights", np.ones(shape, np.float32))
    for name, value in given.items():
        if value.shape != shape:
            raise ValueError(f"{name} of shape {value.shape} beside target_tokens of shape {shape}")
        if not np.isfinite(value).all():
            raise ValueError(f"{name} with numbers that are not finite")
    rows = {name: value.reshape(len(tokens), -1).astype(np.float32) for name, value in given.items()}
    return Datum(tokens, targets.reshape(len(tokens), -1).astype(np.int64), rows, is_flat)


def check_tokens(ids: np.ndarray, vocabulary: int, what: str = "token ids", remedy: str = "") -> None:
    """Raises ValueError for token ids out of range."""
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"{what} from {ids.min()} to {ids.max()}: 0 to {vocabulary - 1} are needed{remedy}")


def _array(raw: bytes, dtype: np.dtype) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for numbers of {dtype.itemsize} bytes")
    return np.frombuffer(raw, dtype)


def _tensor(message: Any) -> np.ndarray:
    """A tensor as an array; absent cells of a sparse one are 0."""
    name = messages().DType.Name(message.dtype)
    if name not in _DTYPES:
        raise ValueError(f"a tensor of {name}")
    dtype, shape = np.dtype(_DTYPES[name]), tuple(message.shape)
    if message.WhichOneof("encoding") == "sparse_csr":
        return _from_csr(message.sparse_csr, dtype, shape)
    values = _array(message.dense, dtype)
    if not shape:
        return values
    if min(shape) < 0 or int(np.prod(shape)) != len(values):
        raise ValueError(f"{len(values)} numbers for shape {shape}")
    return values.reshape(shape)


def _from_csr(csr: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    values = _array(csr.values, dtype)
    rows, columns = (_array(raw, np.dtype(np.int64)) for raw in (csr.crow_indices, csr.col_indices))
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"a sparse tensor of shape {shape}")
    dense = np.zeros(shape, dtype)
    dense[_csr_rows(rows, columns, len(values), shape), columns] = values
    return dense


def _csr_rows(rows: np.ndarray, columns: np.ndarray, num_values: int, shape: tuple[int, ...]) -> np.ndarray:
    """The row of each value of a sparse tensor."""
    fits = len(rows) == shape[0] + 1 and len(columns) == num_values and (np.diff(rows) >= 0).all()
    if not fits or rows[0] != 0 or rows[-1] != num_values:
        raise ValueError("a sparse tensor whose indices do not fit together")
    if num_values and not 0 <= int(columns.min()) <= int(columns.max()) < shape[1]:
        raise ValueError("a sparse tensor with columns out of range")
    return np.repeat(np.arange(shape[0]), np.diff(rows))


def forward_backward_output(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """The result of ``forward_backward`` in protobuf.

    Args:
        outputs: float32 arrays [L] or [L, K] of each datum, under the same names.
        metrics: numbers; the SDK combines those of several requests by the end of their names.
    """
    pb = messages()
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    start = 0
    while start < len(outputs):  # one record for datums of one trailing shape
        trailing = {name: value.shape[1:] for name, value in outputs[start].items()}
        stop = start
        while stop < len(outputs) and {n: v.shape[1:] for n, v in outputs[stop].items()} == trailing:
            stop += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        for name, shape in trailing.items():
            parts = [np.ascontiguousarray(each[name], np.float32) for each in outputs[start:stop]]
            field = record.fields[name]
            field.data = b"".join(part.tobytes() for part in parts)
            field.offsets = np.cumsum([0, *(part.nbytes for part in parts)]).astype(np.int64).tobytes()
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend(shape)
        start = stop
    return bytes(message.SerializeToString())


@dataclass(frozen=True)
class Targets:
    """Token ids that a request scores at positions of its prompt.

    Args:
        ids: [n]; -1 for none.
        rows: [n] row of each id; row i is about token i + 1 of the prompt.
        shape: of the request's tensor.
        csr: row pointers and columns of a sparse tensor; None for a dense one.
    """

    ids: np.ndarray
    rows: np.ndarray
    shape: tuple[int, int]
    csr: tuple[np.ndarray, np.ndarray] | None


def targets_of(tensor: TokenTensor | None, num_rows: int) -> Targets | None:
    """``target_prompt_logprobs`` of a prompt of ``num_rows + 1`` tokens.

    Raises:
        RefusedError: another number of rows, more than ``MAX_TARGETS`` columns, or nothing to score.
    """
    if tensor is None:
        return None
    ids, (rows, columns) = np.array(tensor.data, np.int64), tensor.shape
    if rows != num_rows or not 1 <= columns <= MAX_TARGETS or not (ids >= 0).any():
        raise RefusedError(
            400,
            f"target_prompt_logprobs of shape {tensor.shape} with {(ids >= 0).sum()} ids: {num_rows} rows, one a token "
            f"behind the first, of at most {MAX_TARGETS} columns, and at least one id are needed",
        )
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    try:
        if crow is not None and col is not None:
            csr = np.array(crow, np.int64), np.array(col, np.int64)
            return Targets(ids, _csr_rows(*csr, len(ids), (rows, columns)), (rows, columns), csr)
        if len(ids) != rows * columns or (crow, col) != (None, None):
            raise ValueError(f"{len(ids)} numbers for shape {tensor.shape}")
    except ValueError as error:
        raise RefusedError(400, f"target_prompt_logprobs: {error}") from error
    return Targets(ids, np.repeat(np.arange(rows), columns), (rows, columns), None)


NO_TOKEN = (0, -99999.0)
"""Id and log-prob by which the SDK knows that a position has no likeliest tokens."""


@dataclass(frozen=True)
class Top:
    """Likeliest tokens: ids and log-probs [positions, k]."""

    ids: np.ndarray
    logprobs: np.ndarray

    def message(self) -> Any:
        length, k = self.ids.shape
        raw = self.ids.astype(np.int32).tobytes(), self.logprobs.astype(np.float32).tobytes()
        return messages().TopkLogprobs(token_ids=raw[0], logprobs=raw[1], k=k, length=length)


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence, and the likeliest tokens at its positions if they were wanted."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    top: Top | None = None


NO_TOKENS = Sampled(np.zeros(0, np.int32), np.zeros(0, np.float32), stopped=False)
"""Of a prompt that leaves no position."""


@dataclass(frozen=True)
class PromptScores:
    """The scores of a prompt of L tokens that a request wants.

    Args:
        logprobs: [L], NaN where there is none.
        top: likeliest tokens.
        targets: the request's ids and the log-prob of each; 0 where the id is -1.
    """

    logprobs: np.ndarray | None = None
    top: Top | None = None
    targets: tuple[Targets, np.ndarray] | None = None


def sample_output(sequences: Sequence[Sampled], prompt: PromptScores) -> bytes:
    """The result of ``asample`` in protobuf."""
    pb = messages()
    message = pb.SampleResponse()
    for each in sequences:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if each.stopped else pb.STOP_REASON_LENGTH,
            tokens=each.tokens.astype(np.int32).tobytes(),
            logprobs=each.logprobs.astype(np.float32).tobytes(),
        )
        if each.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(each.top.message())
    if prompt.logprobs is not None:
        message.prompt_logprobs = prompt.logprobs.astype(np.float32).tobytes()
    if prompt.top is not None:
        message.topk_prompt_logprobs.CopyFrom(prompt.top.message())
    if prompt.targets is not None:
        (asked, found), tensor = prompt.targets, message.target_prompt_logprobs
        tensor.dtype, raw = pb.DTYPE_FLOAT32, found.astype(np.float32).tobytes()
        tensor.shape.extend(asked.shape)
        if asked.csr is None:
            tensor.dense = raw
        else:
            crow, col = (each.tobytes() for each in asked.csr)
            tensor.sparse_csr.CopyFrom(pb.SparseCsr(values=raw, crow_indices=crow, col_indices=col))
    return bytes(message.SerializeToString())
