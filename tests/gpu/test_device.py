"""The CUDA device itself: what `gpu-check --self` checks, as one test."""


def test_the_device_does_what_its_own_check_asks(gpu):
    from checks import selftest
    from checks.report import Report

    report = Report()
    selftest.run(report)
    assert not report.failed, report.table()
