import pytest
import small_models

import narrowgate as ng


@pytest.fixture(scope="session", params=small_models.KINDS)
def pair(request, tmp_path_factory):
    """(transformers' model, ours) of one random checkpoint, for every family."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = small_models.build(request.param, folder)
    return theirs, ng.load(folder)
