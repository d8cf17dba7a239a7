"""What differs between an environment and what it was built as."""

from pathlib import Path

from nrl.runtime.venvs.inspection import list_wrong_packages


def test_a_version_is_what_the_package_says_where_its_folder_has_another_form(tmp_path: Path) -> None:
    info = tmp_path / "lib/python3.12/site-packages/Tiny_Lib-1.0_cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Tiny_Lib\nVersion: 1.0+cpu\n")
    inventory = {"packages": {"tiny-lib": {"version": "1.0+cpu", "source": "index"}}}
    assert list(list_wrong_packages(tmp_path, inventory)) == []
    inventory["packages"]["tiny-lib"]["version"] = "2.0"
    assert list(list_wrong_packages(tmp_path, inventory)) == ["tiny-lib is 1.0+cpu instead of 2.0"]


def test_files_and_packages_that_are_gone_or_new(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    for name in ("one", "two"):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").touch()
        listed = [f"{name}.py", f"{info.name}/RECORD", f"__pycache__/{name}.cpython-312.pyc"]
        (info / "RECORD").write_text("".join(f"{each},,\n" for each in listed))
    inventory = {"packages": {name: {"version": "1.0", "source": "index"} for name in ("one", "two")}}
    assert list(list_wrong_packages(tmp_path, inventory)) == []
    (site / "one.py").unlink()
    assert list(list_wrong_packages(tmp_path, inventory)) == ["one lacks 1 of its files, such as one.py"]
    del inventory["packages"]["two"]
    inventory["packages"]["three"] = {"version": "1.0", "source": "index"}
    assert list(list_wrong_packages(tmp_path, inventory)) == [
        "three is missing",
        "two does not belong there",
        "one lacks 1 of its files, such as one.py",
    ]
