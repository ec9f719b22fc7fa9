# SPDX-License-Identifier: Apache-2.0
"""Every command that a page shows, by its first two words, and the test that runs it."""

README_COMMANDS: dict[str, str] = {
    "make install": "tests/test_make.py::test_installing_sets_everything_up_once",
    "make demo": "tests/test_make.py::test_the_demo_trains_then_drills_into_fresh_folders",
    "make sft": "tests/test_make.py::test_sft_installs_the_model_and_trains_into_a_fresh_folder",
    "make pretrain": "tests/test_make.py::test_pretrain_resumes_in_the_same_folder",
    "make compare": "tests/test_make.py::test_compare_is_two_comparisons_offline",
    "mprecipes compare": "tests/cases/test_m06_only_the_precision_differs.py"
    "::test_the_report_proves_it_by_digests",
    "mprecipes report": "tests/unit/tools/test_cli_compare.py"
    "::test_report_prints_verdicts_and_where_it_is",
    "make test": "tests/test_make.py::test_each_test_target_selects_its_tests",
    "make test-fast": "tests/test_make.py::test_each_test_target_selects_its_tests",
    "make test-full": "tests/test_make.py::test_each_test_target_selects_its_tests",
    "make style": "tests/test_make.py::test_style_and_quality_run_the_tools",
    "make quality": "tests/test_make.py::test_style_and_quality_run_the_tools",
    "make soak": "tests/test_make.py::test_the_soak_is_offline_and_bounded",
    "make golden": "tests/test_make.py::test_golden_records_again",
    "accelerate launch": "tests/recipes/test_readme_commands.py::test_your_own_data_then_a_look",
    "mprecipes status": "tests/recipes/test_readme_commands.py::test_your_own_data_then_a_look",
    "mprecipes verify": "tests/recipes/test_readme_commands.py::test_your_own_data_then_a_look",
    "mprecipes plan": "tests/unit/tools/test_plan.py::test_the_command_of_the_page",
    "mprecipes prune": "tests/unit/tools/test_keeping.py::test_the_commands_of_the_page",
    "mprecipes milestone": "tests/unit/tools/test_keeping.py::test_the_commands_of_the_page",
    "mprecipes export": "tests/unit/tools/test_export.py::test_the_command_of_the_page",
    "mprecipes pin": "tests/unit/tools/test_keeping.py::test_the_commands_of_the_page",
    "mprecipes preview": "tests/unit/tools/test_preview.py::test_the_command",
    "mprecipes drill": "tests/recipes/test_readme_commands.py::test_the_drill_of_the_page",
}
