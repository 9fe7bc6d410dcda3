"""The table of admin verbs holds for admin.proto, for the client and for the undo of changes."""

from __future__ import annotations

import inspect

import pytest

from recinfer.serving.client.admin import AdminClient
from recinfer.serving.wire.admin_verbs import VERBS, Verb
from recinfer.serving.wire.proto import admin_pb2


def test_the_table_has_the_methods_of_the_service():
    service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
    assert set(VERBS) == set(service.methods_by_name)
    assert all(VERBS[name].request.DESCRIPTOR is method.input_type for name, method in service.methods_by_name.items())


@pytest.mark.parametrize("verb", VERBS.values(), ids=list(VERBS))
def test_a_verb_fits_its_request(verb: Verb):
    fields = dict(verb.request.DESCRIPTOR.fields_by_name)
    taken = inspect.signature(getattr(AdminClient, verb.method)).parameters
    assert fields.keys() - {"change"} == taken.keys() - {"self", "reason"}
    assert verb.changes == ("reason" in taken)
    if not verb.changes:
        return
    assert isinstance(verb.subject(verb.request()), str)
    assert verb.done.format(**dict.fromkeys(fields, "x")) and (verb.version is not None) == ("version" in fields)
    if verb.command:
        assert verb.command.flags.keys() <= fields.keys()
    if verb.undo:  # reads the same bytes
        undo = VERBS[verb.undo].request.DESCRIPTOR.fields_by_name
        assert all(fields[name].number == field.number for name, field in undo.items())
