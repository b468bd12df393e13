"""The arguments of a model's method that ends in its head, by name, its labels above all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from mcore_logprobs.megatron.calls import NOT_PASSED

# What models call their labels, and the tokens whose followers these are. A T5Model has lm_labels.
# So has a BertModel, whose labels follow no tokens.
_FOLLOWED = {"labels": "input_ids", "lm_labels": "decoder_input_ids"}


class HeadMethod:
    """The method of a model that ends in its head.

    Attributes:
        name: `_postprocess`, or `forward` in a model without it.
        signature: without `self`.
        labels: what it calls its labels, also where it only hands them on by `**kwargs`; "" if it
            takes none by a known name.
        tokens: what it calls the tokens before the labels, or "" if it does not take them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name = "_postprocess" if hasattr(model, "_postprocess") else "forward"
        self.signature = inspect.signature(getattr(type(model), self.name).__get__(model))
        methods = [vars(kind).get(self.name) for kind in type(model).__mro__]
        signatures = [inspect.signature(method) for method in methods if method is not None]
        # A subclass may hand all arguments on to a class that names them.
        naming = next((s for s in signatures if _FOLLOWED.keys() & s.parameters), self.signature)
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


def _takes(signature: inspect.Signature, name: str) -> bool:
    parameters = signature.parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class Arguments:
    """A call's arguments by name, wherever they were put: NOT_PASSED for one that is not there."""

    def __init__(
        self, method: HeadMethod, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        parameters = method.signature.parameters.values()
        self._method = method
        self._bound = method.signature.bind(*args, **kwargs)
        self._bound.apply_defaults()
        rest = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
        self._rest: dict[str, object] = self._bound.arguments[rest[0]] if rest else {}

    def __getitem__(self, name: str) -> object:
        return self._bound.arguments.get(name, self._rest.get(name, NOT_PASSED))

    def __setitem__(self, name: str, value: object) -> None:
        if name in self._bound.arguments:
            self._bound.arguments[name] = value
        else:
            self._rest[name] = value

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
        """Whether a T5Model is asked for its encoder's hidden states alone."""
        return self["output_encoder_hidden_only"] is True

    def call(self, function: Callable[..., object]) -> object:
        return function(*self._bound.args, **self._bound.kwargs)
