from dsa_dispatch.testing import BackendConformance


class TestConformance(BackendConformance):
    pass
