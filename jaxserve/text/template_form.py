"""What a chat template reads of the messages, found in its syntax tree.

Templates take messages in different forms, and leave out what comes in another one without a word: a list where text
is read, text where a list is read, a role or a field that they do not name. The tree is run on abstract values: a
variable holds *what* it may be (a message, its content, the arguments of a call), conditions on a role or a type narrow
that, and macros are entered with the values of their arguments. That needs no message, and is done once for a template.

What the tree does not say (names that are computed) counts as not read; there a template gets text as text.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jinja2 import meta, nodes

THOUGHT_NAMES = ("reasoning_content", "thinking", "reasoning")  # the first that a message has is its thought
_OTHER = "*"  # every role without a meaning of its own
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", _OTHER})
_TEXT, _RICH = "text", "rich"  # rich: a list of parts for content, an object for arguments
_FORMS = frozenset({_TEXT, _RICH})

_SAME = frozenset({"default", "d", "list", "reverse", "safe", "sort", "unique"})  # filters that hand on what they get
_OF_ITEMS = frozenset({"selectattr", "rejectattr", "select", "reject", "map", "groupby", "first", "last", "random"})
_OF_OBJECTS = frozenset({"tojson", "items", "dictsort", "xmlattr"})
_ROLE_IS = tuple(["role", word] for word in ("equalto", "eq", "=="))
_OBJECT_METHODS = frozenset({"items", "keys", "values", "get"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """The form in which one template reads messages.

    Attributes:
      variables: names that the caller of the template may set (`tools`, `enable_thinking`, …).
      names_developer: it has the role `developer`.
      thoughts: names under which it reads the thought of a message.
      text_roles: roles whose content it reads as text.
      part_roles: roles whose content it reads as a list of parts wherever it reads it, or wherever it is a list.
      first_part_roles: roles of whose parts it reads the text of the first alone, in some place.
      wants_argument_text: it reads the arguments of a call as JSON text only.
      asks_for_null: it looks for calls where `content is none`, and there alone.
    """

    variables: frozenset[str] = frozenset()
    names_developer: bool = False
    thoughts: tuple[str, ...] = ()
    text_roles: frozenset[str] = frozenset()
    part_roles: frozenset[str] = frozenset()
    first_part_roles: frozenset[str] = frozenset()
    wants_argument_text: bool = False
    asks_for_null: bool = False

    def takes_text(self, role: str) -> bool:
        return (role if role in _ROLES else _OTHER) in self.text_roles

    def takes_parts(self, role: str) -> bool:
        return (role if role in _ROLES else _OTHER) in self.part_roles

    def takes_one_part(self, role: str) -> bool:
        """Whether it would leave out the second of two parts."""
        return (role if role in _ROLES else _OTHER) in self.first_part_roles


def read_form(tree: nodes.Template) -> TemplateForm:
    """The form of a parsed template."""
    reader = _Reader()
    reader.run(tree.body)
    fields = set(_field_names(tree))
    return TemplateForm(
        names_developer=any(const.value == "developer" for const in tree.find_all(nodes.Const)),
        thoughts=tuple(name for name in THOUGHT_NAMES if name in fields),
        text_roles=frozenset(reader.text_roles),
        part_roles=frozenset(reader.part_roles - reader.only_text_roles),
        first_part_roles=frozenset(reader.first_part_roles),
        wants_argument_text=reader.needs_argument_text and not reader.reads_argument_objects,
        asks_for_null=reader.asks_for_null,
        variables=frozenset(meta.find_undeclared_variables(tree)),  # the last, as it folds constants of the tree
    )


def _field_names(tree: nodes.Template) -> Iterator[str]:
    """Names of fields that are read: `m.NAME`, `m["NAME"]`, `m.get("NAME")`, `"NAME" in m`."""
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Compare)):
        if isinstance(node, nodes.Compare):
            constants = [node.expr] if node.ops and node.ops[0].op in ("in", "notin") else []
        elif isinstance(node, nodes.Getattr):
            yield node.attr
            continue
        else:
            constants = [node.arg] if isinstance(node, nodes.Getitem) else node.args[:1]
        yield from (c.value for c in constants if isinstance(c, nodes.Const) and isinstance(c.value, str))


class _Ref(NamedTuple):
    """Something that a variable may hold. `key` names the message or call that it is or belongs to."""

    kind: str
    key: str
    roles: frozenset[str] = _ROLES
    forms: frozenset[str] = _FORMS


_Value = frozenset[_Ref]
_Bounds = dict[str, frozenset[str]]  # "role:KEY", "content:KEY" and "arguments:KEY" to what is left of them
_NOTHING: _Value = frozenset()


class _Reader:
    """Runs a tree, and keeps what was read. Used by `read_form` alone."""

    def __init__(self) -> None:
        self.text_roles: set[str] = set()
        self.only_text_roles: set[str] = set()  # read as text without a look at what it is
        self.part_roles: set[str] = set()
        self.first_part_roles: set[str] = set()
        self.needs_argument_text = False
        self.reads_argument_objects = False
        self.asks_for_null = False
        self._held: dict[str, _Value] = {"messages": frozenset({_Ref("messages", "messages")})}
        self._bounds: _Bounds = {}
        self._macros: dict[str, nodes.Macro] = {}
        self._conditions: dict[str, nodes.Expr] = {}
        self._entered: set[object] = set()

    # ---- statements --------------------------------------------------------------------------------------------------

    def run(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                self._as_text(self._value(part))
        elif isinstance(node, nodes.If):
            self._branch(node)
        elif isinstance(node, nodes.For):
            self._loop(node)
        elif isinstance(node, nodes.Assign):
            assert isinstance(node.node, nodes.Expr)  # as Jinja parses it
            self._assign(node.target, node.node)
        elif isinstance(node, nodes.Macro):
            self._macros[node.name] = node
        elif isinstance(node, nodes.AssignBlock | nodes.Scope | nodes.With | nodes.FilterBlock | nodes.CallBlock):
            if isinstance(node, nodes.With):
                for target, value in zip(node.targets, node.values, strict=True):
                    self._assign(target, value)
            if isinstance(node, nodes.CallBlock):
                self._value(node.call)
            self.run(node.body)
        elif isinstance(node, nodes.ExprStmt):
            self._value(node.node)

    def _branch(self, node: nodes.If) -> None:
        self._value(node.test)
        before, bounds = dict(self._held), self._bounds
        self._bounds = self._narrowed(node.test, True, bounds)
        self.run(node.body)
        after, self._held = self._held, dict(before)
        self._bounds = self._narrowed(node.test, False, bounds)
        if node.elif_:
            first, *rest = node.elif_
            self._branch(nodes.If(first.test, first.body, rest, node.else_))
        else:
            self.run(node.else_)
        for name, value in after.items():
            self._held[name] = self._held.get(name, _NOTHING) | value
        self._bounds = bounds

    def _loop(self, node: nodes.For) -> None:
        items = self._items(self._value(node.iter), getattr(node.target, "name", ""))
        bounds = self._bounds
        dropped = {f"{what}:{ref.key}" for ref in items for what in ("role", "content", "arguments")}
        self._bounds = {name: left for name, left in bounds.items() if name not in dropped}
        for _ in range(2 if items else 1):  # what one message's round assigns is read by the next one's
            if isinstance(node.target, nodes.Name):
                self._held[node.target.name] = items
            if node.test is not None:
                self._value(node.test)
                self._bounds = self._narrowed(node.test, True, self._bounds)
            before = dict(self._held)
            self.run(node.body)
            for name, value in before.items():
                self._held[name] = self._held.get(name, _NOTHING) | value
        self._bounds = bounds
        self.run(node.else_)

    def _items(self, values: _Value, name: str) -> _Value:
        """What a loop over a value sees, its variable being `name`."""
        found = set()
        for ref in values:
            if ref.kind == "messages":
                found.add(ref._replace(kind="message", key=name))
            elif ref.kind == "calls":
                found.add(ref._replace(kind="call", key=name))
            elif ref.kind == "content":
                self._as_parts(ref)
            elif ref.kind == "arguments":
                self._as_object(ref)
        return frozenset(found)

    def _assign(self, target: nodes.Node, node: nodes.Expr) -> None:
        if isinstance(target, nodes.Tuple) and isinstance(node, nodes.Tuple) and len(target.items) == len(node.items):
            for one, value in zip(target.items, node.items, strict=True):
                self._assign(one, value)
            return
        value = self._value(node)
        if isinstance(target, nodes.NSRef):
            name = f"{target.name}.{target.attr}"
            self._held[name] = self._held.get(name, _NOTHING) | value
        elif isinstance(target, nodes.Name):
            self._held[target.name] = value
            self._conditions.pop(target.name, None)
            if isinstance(node, nodes.Compare | nodes.Test | nodes.And | nodes.Or | nodes.Not):
                self._conditions[target.name] = node
            if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace":
                for keyword in node.kwargs:
                    self._held[f"{target.name}.{keyword.key}"] = self._value(keyword.value)

    # ---- expressions -------------------------------------------------------------------------------------------------

    def _value(self, node: nodes.Node | None) -> _Value:
        """What an expression may be; reads on the way are kept."""
        if isinstance(node, nodes.Name):
            return self._held.get(node.name, _NOTHING)
        if isinstance(node, nodes.Getattr):
            if isinstance(node.node, nodes.Name) and f"{node.node.name}.{node.attr}" in self._held:
                return self._held[f"{node.node.name}.{node.attr}"]
            if node.attr in ("previtem", "nextitem"):
                return frozenset({_Ref("message", repr(node))})
            return self._field(self._value(node.node), node.attr)
        if isinstance(node, nodes.Getitem):
            return self._item(node)
        if isinstance(node, nodes.Filter):
            return self._filtered(node)
        if isinstance(node, nodes.Call):
            return self._called(node)
        if isinstance(node, nodes.CondExpr):
            self._value(node.test)
            return self._within(node.test, True, node.expr1) | self._within(node.test, False, node.expr2)
        if isinstance(node, nodes.And):
            self._value(node.left)
            return self._within(node.left, True, node.right)
        if isinstance(node, nodes.Or):
            return self._value(node.left) | self._within(node.left, False, node.right)
        if isinstance(node, nodes.Concat | nodes.Add):
            operands = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
            if any(isinstance(operand, nodes.List) for operand in operands):
                return frozenset().union(*map(self._value, operands))
            for operand in operands:
                self._as_text(self._value(operand))
            return _NOTHING
        if node is not None:
            for child in node.iter_child_nodes():
                self._value(child)
        return _NOTHING

    def _within(self, test: nodes.Expr, truth: bool, node: nodes.Node | None) -> _Value:
        """The value of an expression where `test` is `truth`."""
        bounds, self._bounds = self._bounds, self._narrowed(test, truth, self._bounds)
        value = self._value(node)
        self._bounds = bounds
        return value

    def _field(self, values: _Value, name: str) -> _Value:
        found = set()
        for ref in values:
            if ref.kind == "message" and name in ("role", "content", "tool_calls"):
                kind = "calls" if name == "tool_calls" else name
                if kind == "calls" and not self._bounds.get(f"content:{ref.key}", _FORMS):
                    self.asks_for_null = True
                forms = self._bounds.get(f"content:{ref.key}", _FORMS) if kind == "content" else _FORMS
                found.add(_Ref(kind, ref.key, self._roles(ref), forms))
            elif ref.kind == "call" and name == "function":
                found.add(ref)
            elif ref.kind == "call" and name == "arguments":
                found.add(ref._replace(kind="arguments", forms=self._bounds.get(f"arguments:{ref.key}", _FORMS)))
            elif ref.kind == "part":
                self._as_parts(ref)
                if name == "text" and _RICH in self._forms(ref):
                    self.first_part_roles |= self._roles(ref)
        return frozenset(found)

    def _item(self, node: nodes.Getitem) -> _Value:
        values = self._value(node.node)
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            return self._field(values, node.arg.value)
        self._value(node.arg)
        if isinstance(node.arg, nodes.Slice):
            return values
        return self._one_of(values, node)

    def _one_of(self, values: _Value, node: nodes.Node) -> _Value:
        """An item of a list by its place, which `node` is; two equal expressions are one item."""
        kinds = {"messages": "message", "calls": "call", "content": "part"}
        keyed = {"messages": repr(node), "calls": repr(node)}
        return frozenset(
            ref._replace(kind=kinds[ref.kind], key=keyed.get(ref.kind, ref.key)) for ref in values if ref.kind in kinds
        )

    def _filtered(self, node: nodes.Filter) -> _Value:
        values = self._value(node.node)
        for argument in (*node.args, *(keyword.value for keyword in node.kwargs)):
            self._value(argument)
        if node.name in ("first", "last"):
            return self._one_of(values, node)
        if node.name in _SAME:
            return values.union(*map(self._value, node.args)) if node.name in ("default", "d") else values
        found = set()
        for ref in values:
            if ref.kind == "messages":
                found |= self._chosen(ref, node)
            elif ref.kind == "content" and node.name in _OF_ITEMS:
                self._as_parts(ref)
            elif ref.kind == "arguments" and node.name in _OF_OBJECTS:
                self._as_object(ref)
            elif node.name not in ("length", "count"):
                self._as_text({ref})
        return frozenset(found)

    def _chosen(self, ref: _Ref, node: nodes.Filter) -> set[_Ref]:
        """Messages behind a filter: those of a role, or the texts of all."""
        if node.name == "map":
            names = [keyword.value for keyword in node.kwargs if keyword.key == "attribute"]
            if any(isinstance(name, nodes.Const) and name.value == "content" for name in names):
                self._as_text({ref._replace(kind="content")})
            return set()
        words = [argument.value for argument in node.args if isinstance(argument, nodes.Const)]
        if node.name in ("selectattr", "rejectattr") and words[:2] in _ROLE_IS and len(words) == 3:
            named = frozenset({words[2]})
            return {ref._replace(roles=ref.roles & named if node.name == "selectattr" else ref.roles - named)}
        return {ref} if node.name in ("selectattr", "rejectattr") else set()

    def _called(self, node: nodes.Call) -> _Value:
        given = [self._value(argument) for argument in node.args]
        named = {keyword.key: self._value(keyword.value) for keyword in node.kwargs}
        if isinstance(node.node, nodes.Name):
            macro = self._macros.get(node.node.name)
            if macro is not None:
                self._enter(macro, given, named)
            return _NOTHING
        if not isinstance(node.node, nodes.Getattr):
            self._value(node.node)
            return _NOTHING
        values, method = self._value(node.node.node), node.node.attr
        if method == "get" and node.args and isinstance(node.args[0], nodes.Const):
            return self._field(values, str(node.args[0].value)).union(*given[1:])
        for ref in values:
            if ref.kind == "arguments" and method in _OBJECT_METHODS:
                self._as_object(ref)
            elif method not in _OBJECT_METHODS:
                self._as_text({ref})
        return _NOTHING

    def _enter(self, macro: nodes.Macro, given: Sequence[_Value], named: Mapping[str, _Value]) -> None:
        outside = dict(self._held)
        names = [argument.name for argument in macro.args]
        for name, default in zip(names[len(names) - len(macro.defaults) :], macro.defaults, strict=True):
            self._held[name] = self._value(default)
        self._held |= dict(zip(names, given, strict=False))
        self._held |= {name: value for name, value in named.items() if name in names}
        # Once is enough for arguments, and an end for macros that call themselves.
        held = frozenset((name, value) for name in names if (value := self._held.get(name)))
        state = (macro.name, held, frozenset(self._bounds.items()) if held else None)
        if state not in self._entered:
            self._entered.add(state)
            self.run(macro.body)
        self._held = outside

    # ---- reads -------------------------------------------------------------------------------------------------------

    def _roles(self, ref: _Ref) -> frozenset[str]:
        return ref.roles & self._bounds.get(f"role:{ref.key}", _ROLES)

    def _forms(self, ref: _Ref) -> frozenset[str]:
        kind = "content" if ref.kind == "part" else ref.kind
        return ref.forms & self._bounds.get(f"{kind}:{ref.key}", _FORMS)

    def _as_text(self, values: _Value | set[_Ref]) -> None:
        for ref in values:
            if ref.kind == "content" and _TEXT in self._forms(ref):
                self.text_roles |= self._roles(ref)
                if _RICH in self._forms(ref):
                    self.only_text_roles |= self._roles(ref)
            elif ref.kind == "arguments" and _RICH in self._forms(ref):
                self.needs_argument_text = True

    def _as_parts(self, ref: _Ref) -> None:
        if _RICH in self._forms(ref):
            self.part_roles |= self._roles(ref)

    def _as_object(self, ref: _Ref) -> None:
        if _RICH in self._forms(ref):
            self.reads_argument_objects = True

    # ---- conditions --------------------------------------------------------------------------------------------------

    def _narrowed(self, test: nodes.Node, truth: bool, bounds: _Bounds) -> _Bounds:
        """The bounds where a condition is `truth`."""
        if isinstance(test, nodes.Not):
            return self._narrowed(test.node, not truth, bounds)
        if isinstance(test, nodes.And | nodes.Or):
            both = isinstance(test, nodes.And) is truth
            left = self._narrowed(test.left, truth, bounds)
            if both:
                return self._narrowed(test.right, truth, left)
            right = self._narrowed(test.right, truth, self._narrowed(test.left, not truth, bounds))
            return {name: left[name] | right[name] for name in left.keys() & right.keys()}
        if isinstance(test, nodes.Name) and test.name in self._conditions:
            condition = self._conditions.pop(test.name)  # which may be about its own older value
            narrowed = self._narrowed(condition, truth, bounds)
            self._conditions[test.name] = condition
            return narrowed
        if isinstance(test, nodes.Compare) and len(test.ops) == 1:
            return self._compared(test.expr, test.ops[0].op, test.ops[0].expr, truth, bounds)
        if isinstance(test, nodes.Test):
            if test.name in ("eq", "equalto", "==", "ne", "!=", "in"):
                op = {"equalto": "eq", "==": "eq", "!=": "ne"}.get(test.name, test.name)
                return self._compared(test.node, op, test.args[0], truth, bounds)
            return self._typed(test, truth, bounds)
        return bounds

    def _compared(self, left: nodes.Node, op: str, right: nodes.Node, truth: bool, bounds: _Bounds) -> _Bounds:
        if isinstance(left, nodes.Const):
            left, right = right, left
        words = right.items if isinstance(right, nodes.List | nodes.Tuple) else [right]
        if op not in ("eq", "ne", "in", "notin") or not all(isinstance(word, nodes.Const) for word in words):
            return bounds
        named = frozenset(word.value if word.value in _ROLES else _OTHER for word in words)  # pyright: ignore[reportAttributeAccessIssue]
        is_named = (op in ("eq", "in")) is truth
        narrowed = dict(bounds)
        while isinstance(left, nodes.Filter):  # role | lower, role | trim
            left = left.node or right
        for ref in self._value(left):
            if ref.kind == "role":
                roles = bounds.get(f"role:{ref.key}", _ROLES)
                narrowed[f"role:{ref.key}"] = roles & named if is_named else roles - (named - {_OTHER})
        return narrowed

    def _typed(self, test: nodes.Test, truth: bool, bounds: _Bounds) -> _Bounds:
        narrowed = dict(bounds)
        for ref in self._value(test.node):
            if ref.kind not in ("content", "arguments"):
                continue
            name = f"{ref.kind}:{ref.key}"
            left, here = bounds.get(name, _FORMS), None
            rich_test = "mapping" if ref.kind == "arguments" else "list"
            if test.name == "string":
                here = frozenset({_TEXT})
            elif test.name == rich_test:
                here = frozenset({_RICH})
            elif test.name in ("sequence", "iterable", "defined"):
                here = _FORMS
            elif test.name in ("none", "undefined", "mapping", "number", "boolean"):
                here = frozenset()
            if here is not None:
                narrowed[name] = left & here if truth else left - here
        return narrowed
