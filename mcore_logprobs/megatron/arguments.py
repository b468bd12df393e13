"""The arguments of a model's method that ends in its head, by name, its labels above all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType

from torch import nn

from mcore_logprobs.megatron.calls import NOT_PASSED
from mcore_logprobs.megatron.imports import PassedArguments

# What models call their labels, and the tokens whose followers these are. A T5Model has lm_labels.
# So has a BertModel, whose labels follow no tokens.
_FOLLOWED = {"labels": "input_ids", "lm_labels": "decoder_input_ids"}


class HeadMethod:
    """The method of a model that ends in its head.

    Attributes:
        name: `_postprocess`, or `forward` in a model without it or whose forward goes around it.
        signature: without `self`; of the model's own, where somebody has put one on it.
        positions: the signature by which arguments without a name are told.
        defaults: of both, by parameter.
        labels: what it calls its labels, also where it only hands them on by `**kwargs`; "" if it
            takes none by a known name.
        tokens: what it calls the tokens before the labels, or "" if it does not take them.
    """

    def __init__(self, model: nn.Module) -> None:
        has_part = hasattr(model, "_postprocess") and not _calls_head_itself(model.forward)
        self.name = "_postprocess" if has_part else "forward"
        of_class = inspect.signature(getattr(type(model), self.name).__get__(model))
        self.signature = _signature_or(of_class, vars(model).get(self.name))
        # Those behind *args are the class's.
        hands_on = any(p.kind is p.VAR_POSITIONAL for p in self.signature.parameters.values())
        self.positions = of_class if hands_on else self.signature
        self.defaults = {
            p.name: p.default
            for signature in (self.positions, self.signature)
            for p in signature.parameters.values()
            if p.default is not p.empty
        }
        methods = [vars(kind).get(self.name) for kind in type(model).__mro__]
        signatures = [inspect.signature(method) for method in methods if method is not None]
        # A subclass may hand all arguments on to a class that names them.
        of_all = (self.signature, *signatures)
        naming = next((s for s in of_all if _FOLLOWED.keys() & s.parameters), self.signature)
        labels = next((name for name in _FOLLOWED if name in naming.parameters), "labels")
        tokens = _FOLLOWED[labels]
        self.labels = labels if _takes(self.signature, labels) else ""
        self.tokens = tokens if self.labels and _takes(naming, tokens) else ""
        whose = f"{type(model).__name__}, whose {self.name}"
        self._lacks_labels = f"{whose} has neither labels nor lm_labels"
        self._lacks_tokens = f"{whose} has no {tokens} that {labels} could follow"
        self._hides = f"{whose} has *args or **kwargs that do not show whether there are {labels}"

    @property
    def lacking(self) -> str:
        """The model, and what its method does not take of labels and tokens."""
        return self._lacks_tokens if self.labels else self._lacks_labels

    @property
    def unclear(self) -> str:
        """The model, and why a call may have labels that are not seen."""
        return self._hides if self.labels else self._lacks_labels


def _calls_head_itself(forward: Callable[..., object]) -> bool:
    """Whether a forward's own code has the output layer in it, and not `_postprocess`."""
    function = inspect.unwrap(getattr(forward, "__func__", forward))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    names = _names_in(code) if isinstance(code, CodeType) else set()
    return "output_layer" in names and "_postprocess" not in names


def _names_in(code: CodeType) -> set[str]:
    within = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*map(_names_in, within))


def _signature_or(other: inspect.Signature, function: object) -> inspect.Signature:
    """A function's signature; another one for None, and for what has none."""
    try:
        return inspect.signature(function) if callable(function) else other
    except (TypeError, ValueError):
        return other


def _takes(signature: inspect.Signature, name: str) -> bool:
    parameters = signature.parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class Arguments(PassedArguments):
    """A call's arguments, its method's defaults too; NOT_PASSED for one that is not there."""

    def __init__(
        self, method: HeadMethod, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        super().__init__(method.positions, args, kwargs)
        self._method = method

    def __getitem__(self, name: str) -> object:
        return self.get(name, self._method.defaults.get(name, NOT_PASSED))

    def has(self, name: str) -> bool:
        """Whether it is there, and not None."""
        return self[name] is not None and self[name] is not NOT_PASSED

    @property
    def labels(self) -> object:
        """None without labels; NOT_PASSED where the call does not say."""
        return self[self._method.labels]

    @labels.setter
    def labels(self, value: object) -> None:
        self[self._method.labels] = value

    @property
    def ends_before_head(self) -> bool:
        """Whether a T5Model is asked for only its encoder's hidden states."""
        return self["output_encoder_hidden_only"] is True
