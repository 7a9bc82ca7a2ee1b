//! The live page in a real browser: headless Chromium runs its script, draws its charts and takes its picture.
//!
//! Where there is no Chromium the tests are skipped. With `FERROSPEED_SCREENSHOTS=DIR` the pictures stay there to be looked at.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ferrospeed_observe::watch::Server;
use ferrospeed_testkit::browser::chromium;
use ferrospeed_testkit::skip::skip;

/// Serves these runs until the test's process ends.
fn serve(folders: &[PathBuf]) -> String {
    let server = Server::bind(folders, 0).unwrap();
    let address = server.address();
    std::thread::spawn(move || server.run());
    format!("http://{address}/")
}

fn visit(chromium: &Path, profile: &Path, url: &str, more: &[String]) -> Output {
    let output = Command::new(chromium)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--hide-scrollbars", "--virtual-time-budget=5000"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(more)
        .arg(url)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", chromium.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn write_run(folder: &Path, steps: u64, finished: bool) {
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let line = |step: u64| {
        let loss = if step == 7 { "null".to_owned() } else { format!("{}", 5.0 - step as f64 * 0.01) };
        format!(
            "{{\"step\":{step},\"loss\":{loss},\"lr\":0.001,\"grad_norm\":0.5,\"tokens\":{},\"tokens_per_s\":1000.0,\
             \"step_ms\":10.0,\"forward_ms\":4.0,\"backward_ms\":4.0,\"optimizer_ms\":1.0,\"flops_per_s\":1e9,\
             \"memory_bytes\":{{\"parameters\":1000000,\"total\":2000000}},\"skipped\":false,\"loss_scale\":1.0}}\n",
            step * 10
        )
    };
    write("config/run.json", r#"{"steps": 200, "facts": {"ranks": 2}, "recipe": {"name": "a"}}"#.into());
    write("config/ds_config.json", r#"{"bf16": {"enabled": true}}"#.into());
    write("config/recipe.toml", "name = \"<script>alert(1)</script>\"\n".into());
    write("log.jsonl", (1..=steps).map(line).collect());
    write("eval.jsonl", "{\"step\":50,\"loss\":4.25,\"tokens\":70}\n".into());
    if finished {
        write("report.html", "<!DOCTYPE html><title>report</title>".into());
    }
}

/// Width and height of a picture, from its header.
fn size_of(picture: &[u8]) -> (u32, u32) {
    assert!(picture.starts_with(b"\x89PNG\r\n\x1a\n"), "this is no picture");
    let number = |at: usize| u32::from_be_bytes(picture[at..at + 4].try_into().unwrap());
    (number(16), number(20))
}

#[test]
fn the_page_draws_runs_in_every_state_and_says_when_none_has_begun() {
    let Some(chromium) = chromium() else { return skip("no Chromium") };
    let place = tempfile::tempdir().unwrap();
    let folders = ["finished", "running", "not-begun"].map(|name| place.path().join(name));
    write_run(&folders[0], 200, true);
    write_run(&folders[1], 60, false);
    let dom = |folders: &[PathBuf]| {
        let output =
            visit(&chromium, &place.path().join("profile"), &serve(folders), &["--dump-dom".to_owned()]);
        String::from_utf8(output.stdout).unwrap()
    };
    let page = dom(&folders);
    for (what, times) in [("<svg", 6), ("<path", 6), ("class=\"run", 3), ("checkbox", 3)] {
        assert!(page.matches(what).count() >= times, "{what} is not there {times} times:\n{page}");
    }
    for what in ["finished", "running", "not-begun", "starting", "step 60 of 200", "as of "] {
        assert!(page.contains(what), "'{what}' is not shown:\n{page}");
    }
    // What a recipe says is text.
    assert!(!page.contains("<script>alert(1)"), "{page}");
    let empty = dom(&folders[2..]);
    assert!(empty.contains("starting") && !empty.contains("NaN") && !page.contains("NaN"), "{empty}");
}

#[test]
fn the_page_has_its_picture_taken_in_light_and_dark_wide_and_narrow() {
    let Some(chromium) = chromium() else { return skip("no Chromium") };
    let place = tempfile::tempdir().unwrap();
    let folders = ["one", "two"].map(|name| place.path().join(name));
    write_run(&folders[0], 200, true);
    write_run(&folders[1], 90, false);
    take_pictures(&chromium, place.path(), &folders, "runs");
}

/// Takes pictures of a page about some runs in all four ways, and looks at what can be told without eyes.
fn take_pictures(chromium: &Path, place: &Path, folders: &[PathBuf], subject: &str) {
    let kept = std::env::var_os("FERROSPEED_SCREENSHOTS").map(PathBuf::from);
    let pictures = kept.unwrap_or_else(|| place.join("pictures"));
    std::fs::create_dir_all(&pictures).unwrap();
    let url = serve(folders);
    for (width, height) in [(1400, 2300), (420, 5600)] {
        let [dark, light] = [("dark", 0), ("light", 1)].map(|(name, scheme)| {
            let picture = pictures.join(format!("{subject}-{name}-{width}.png"));
            let options = [
                format!("--blink-settings=preferredColorScheme={scheme}"),
                format!("--window-size={width},{height}"),
                format!("--screenshot={}", picture.display()),
            ];
            visit(chromium, &place.join("profile"), &url, &options);
            std::fs::read(&picture).unwrap()
        });
        assert_eq!((size_of(&dark), size_of(&light)), ((width, height), (width, height)));
        // An empty page of this size takes a few kilobytes.
        assert!(dark.len() > 30_000 && light.len() > 30_000, "{} and {} bytes", dark.len(), light.len());
        assert_ne!(dark, light, "the page looks the same in light and dark");
    }
}

/// The same with eight ranks, of which the fifth is slow, a plan, the machine's limits and norms of layers in few steps.
fn write_run_of_eight(folder: &Path, steps: u64) {
    write_run(folder, steps, true);
    let log = std::fs::read_to_string(folder.join("log.jsonl")).unwrap();
    let rank = |rank: u64| {
        let (backward, wait) = if rank == 5 { (60, 0) } else { (30, 30) };
        format!("{{\"forward_ms\":20,\"backward_ms\":{backward},\"wait_ms\":{wait},\"optimizer_ms\":5}}")
    };
    let ranks = (0..8).map(rank).collect::<Vec<_>>().join(",");
    let held = |rank: u64| {
        let activations = if rank == 3 { 1_040_000 } else { 900_000 };
        format!(
            "{{\"parameters\":1000000,\"activations\":{activations},\"total\":{}}}",
            1_000_000 + activations
        )
    };
    let held = (0..8).map(held).collect::<Vec<_>>().join(",");
    let rare = |step: usize| match step {
        1 => format!(",\"rank_memory_bytes\":[{held}]"),
        step if step % 1000 == 7 || step < 30 => {
            let layer =
                |layer: usize| format!("[\"transformer.h.{layer}\",{}]", 0.001 * 4f64.powi(layer as i32));
            format!(",\"layer_norms\":[{}]", (0..6).map(layer).collect::<Vec<_>>().join(","))
        }
        _ => String::new(),
    };
    let with_ranks: String = log
        .lines()
        .map(|line| line.replace("\"step_ms\":10.0", "\"step_ms\":90.0"))
        .enumerate()
        .map(|(step, line)| {
            format!("{},\"ranks\":[{ranks}]{}}}\n", line.strip_suffix('}').unwrap(), rare(step))
        })
        .collect();
    std::fs::write(folder.join("log.jsonl"), with_ranks).unwrap();
    let about = r#"{"steps": 200, "facts": {"ranks": 8}, "recipe": {"name": "a"}, "expected": {
        "plan": {"parameters": 1000000, "activations": 1000000, "total": 2000000},
        "limits": {"compute": 1250.0, "memory": 4000.0, "wire": 90000.0}}}"#;
    std::fs::write(folder.join("config/run.json"), about).unwrap();
    std::fs::write(folder.join("report.html"), "<!DOCTYPE html><title>report</title>").unwrap();
}

#[test]
fn eight_ranks_and_a_hundred_thousand_steps_show_who_waits_for_whom() {
    let Some(chromium) = chromium() else { return skip("no Chromium") };
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("long");
    write_run_of_eight(&folder, 100_000);
    let begin = std::time::Instant::now();
    let output =
        visit(&chromium, &place.path().join("profile"), &serve(&[folder]), &["--dump-dom".to_owned()]);
    let page = String::from_utf8(output.stdout).unwrap();
    for what in [
        "rank 7",
        "wait 30 ms a step for rank 5",
        "What binds: compute, which allows 1.25k tokens per second",
        "(memory 4k, wire 90k); the run reaches 80 % of that",
        "allowed by compute",
        // Rank 3 holds 2.04 MB where 2 were planned.
        "Rank 3 held most: 1.945 MiB, 2 % above the plan of 1.907 MiB",
        "activations, planned: 976.6 KiB",
        "activations, rank 3: 1016 KiB",
        "step 100000, rank 5, backward: 60 ms",
        "Rank 5 least, 0 %".to_lowercase().as_str(),
        "rank 5 waits 0 % of it",
        "transformer.h.5 has most: 1.024",
    ] {
        assert!(page.contains(what), "'{what}' is not shown:\n{page}");
    }
    assert!(!page.contains("NaN"), "{page}");
    // As many shapes as can be told apart, not as many as there are steps.
    let shapes = page.matches("<rect").count() + page.matches("<path").count();
    assert!(shapes < 10_000, "{shapes} shapes");
    // A page that draws every step would take minutes.
    assert!(begin.elapsed() < std::time::Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[test]
fn a_run_of_eight_ranks_has_its_picture_taken_in_light_and_dark_wide_and_narrow() {
    let Some(chromium) = chromium() else { return skip("no Chromium") };
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("eight");
    write_run_of_eight(&folder, 200);
    take_pictures(&chromium, place.path(), &[folder], "ranks");
}
