//! The live page over a real socket: what a browser gets, and what everybody else does.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrospeed_observe::watch::Server;
use ferrospeed_testkit::property::{Random, seeds};
use serde_json::Value;

fn start(folders: &[PathBuf]) -> SocketAddr {
    let server = Server::bind(folders, 0).unwrap();
    let address = server.address();
    // It answers until the test's process ends.
    std::thread::spawn(move || server.run());
    address
}

/// Sends bytes and returns everything that comes back.
fn send(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // A server that has answered already may have closed its side.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn get(address: SocketAddr, path: &str, more: &str) -> (String, String) {
    let answer = send(address, format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{more}\r\n").as_bytes());
    let (head, body) = answer.split_once("\r\n\r\n").expect("a whole answer");
    (head.to_owned(), body.to_owned())
}

fn runs(address: SocketAddr) -> Vec<Value> {
    let (head, body) = get(address, "/runs.json", "");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    serde_json::from_str::<Value>(&body).unwrap()["runs"].as_array().unwrap().clone()
}

fn step(step: u64, loss: &str) -> String {
    format!(
        "{{\"step\":{step},\"loss\":{loss},\"lr\":0.001,\"grad_norm\":0.5,\"tokens\":{},\"tokens_per_s\":1000.0,\
         \"step_ms\":10.0,\"forward_ms\":4.0,\"backward_ms\":4.0,\"optimizer_ms\":1.0,\"flops_per_s\":1e9,\
         \"memory_bytes\":{{\"parameters\":100,\"total\":200}},\"skipped\":false,\"loss_scale\":1.0}}\n",
        step * 10
    )
}

fn write(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

#[test]
fn a_run_is_followed_from_before_its_folder_exists_to_its_report() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("mine");
    let address = start(std::slice::from_ref(&folder));
    let now = || runs(address).remove(0);
    assert_eq!(now()["state"], "starting");
    assert_eq!(now()["name"], "mine");
    write(&folder, "config/run.json", r#"{"steps": 4, "facts": {"ranks": 2}, "recipe": {"name": "mine"}}"#);
    write(&folder, "config/ds_config.json", r#"{"bf16": {"enabled": true}}"#);
    write(&folder, "config/recipe.toml", "name = \"mine\"\n");
    write(&folder, "log.jsonl", "");
    assert_eq!(now()["state"], "starting");
    let mut log = step(1, "3.5");
    write(&folder, "log.jsonl", &(log.clone() + "{\"step\":2,"));
    let run = now();
    assert_eq!(
        (&run["state"], &run["step"], &run["steps_planned"]),
        (&"running".into(), &1.into(), &4.into())
    );
    log += &step(2, "null");
    log += &step(3, "2.5");
    write(&folder, "log.jsonl", &log);
    write(&folder, "eval.jsonl", "{\"step\":3,\"loss\":2.25,\"tokens\":7}\n");
    let run = now();
    assert_eq!(run["curves"]["loss"].to_string(), "[[1.0,3.5],[2.0,null],[3.0,2.5]]");
    assert_eq!(run["curves"]["validation"].to_string(), "[[3.0,2.25]]");
    assert_eq!(run["memory"]["names"].to_string(), "[\"parameters\"]");
    assert_eq!(run["times"]["rows"][0].to_string(), "[1.0,[4.0,4.0,1.0,1.0]]");
    assert_eq!(run["ds_config"]["bf16"]["enabled"], true);
    assert_eq!(run["documents"][0].to_string(), "[\"config/recipe.toml\",\"name = \\\"mine\\\"\\n\"]");
    assert!(
        run["tiles"]
            .as_array()
            .unwrap()
            .iter()
            .any(|tile| tile["name"] == "Training loss" && tile["value"] == "2.5")
    );
    write(&folder, "report.html", "<!DOCTYPE html>");
    assert_eq!(now()["state"], "finished");
}

#[test]
fn a_run_is_what_it_wrote_down_at_its_end() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("mine");
    let address = start(std::slice::from_ref(&folder));
    let now = || runs(address).remove(0);
    write(&folder, "config/run.json", r#"{"steps": 4}"#);
    write(&folder, "log.jsonl", &(step(1, "3.5") + &step(2, "3.0")));
    write(&folder, "report.html", "<!DOCTYPE html>");
    write(&folder, "outcome.json", r#"{"state": "stopped", "step": 2}"#);
    let run = now();
    assert_eq!(
        (&run["state"], &run["step"], &run["log_problem"]),
        (&"stopped".into(), &2.into(), &Value::Null)
    );
    assert_eq!(run["eta_s"], Value::Null);
    // Whatever has become of its log since.
    write(&folder, "log.jsonl", "no record\nno record\n");
    let run = now();
    assert_eq!((&run["state"], &run["step"]), (&"stopped".into(), &2.into()));
    assert_eq!(run["log_problem"], "log.jsonl: none of its lines can be read");
    write(&folder, "outcome.json", r#"{"state": "finished", "step": 4}"#);
    std::fs::remove_file(folder.join("log.jsonl")).unwrap();
    let run = now();
    assert_eq!((&run["state"], &run["step"]), (&"finished".into(), &4.into()));
    assert!(run["log_problem"].as_str().unwrap().starts_with("log.jsonl: No such file"), "{run}");
    // A run of an earlier version wrote its report alone.
    std::fs::remove_file(folder.join("outcome.json")).unwrap();
    assert_eq!(now()["state"], "finished");
    std::fs::remove_file(folder.join("report.html")).unwrap();
    assert_eq!((&now()["state"], &now()["log_problem"]), (&"starting".into(), &Value::Null));
}

#[test]
fn a_mixture_shows_its_routers_and_a_run_without_one_shows_none() {
    let place = tempfile::tempdir().unwrap();
    let (mixture, dense) = (place.path().join("a-mixture"), place.path().join("dense"));
    let routing = r#""routing":[{"layer":0,"tokens_per_expert":[6,2],"dropped_share":0.25,"entropy":0.5},
        {"layer":1,"tokens_per_expert":[4,4],"dropped_share":0.0,"entropy":0.25}],"skipped""#;
    let routed = step(1, "3.5").replace("\"skipped\"", &routing.replace('\n', ""));
    write(&mixture, "log.jsonl", &routed);
    write(&dense, "log.jsonl", &step(1, "3.5"));
    let shown = runs(start(&[mixture, dense]));
    let (mixture, dense) = (&shown[0], &shown[1]);
    assert_eq!(mixture["curves"]["imbalance"].to_string(), "[[1.0,1.5]]");
    assert_eq!(mixture["curves"]["entropy"].to_string(), "[[1.0,0.375]]");
    assert_eq!(mixture["curves"]["dropped"].to_string(), "[[1.0,0.125]]");
    assert_eq!(mixture["routing"][0]["tokens_per_expert"].to_string(), "[6,2]");
    let tiles = mixture["tiles"].as_array().unwrap();
    assert!(
        tiles.iter().any(|tile| tile["name"] == "Busiest expert" && tile["value"] == "1.50"),
        "{tiles:?}"
    );
    assert!(dense["routing"].is_null() && dense["curves"]["entropy"].as_array().unwrap().is_empty());
}

#[test]
fn a_folder_of_runs_shows_each_and_those_that_come_later() {
    let place = tempfile::tempdir().unwrap();
    write(&place.path().join("a"), "log.jsonl", &step(1, "3.0"));
    write(&place.path().join("not-a-run"), "notes.txt", "");
    let address = start(&[place.path().to_path_buf()]);
    let names =
        || runs(address).iter().map(|run| run["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(names(), ["a"]);
    write(&place.path().join("b"), "log.jsonl", &step(1, "2.0"));
    assert_eq!(names(), ["a", "b"]);
    std::fs::remove_dir_all(place.path().join("a")).unwrap();
    assert_eq!(names(), ["b"]);
}

#[test]
fn an_answer_that_did_not_change_is_not_sent_again() {
    let place = tempfile::tempdir().unwrap();
    write(place.path(), "log.jsonl", &step(1, "3.0"));
    let address = start(&[place.path().to_path_buf()]);
    let version = |head: &str| head.lines().find_map(|line| line.strip_prefix("ETag: ")).unwrap().to_owned();
    let (head, _) = get(address, "/runs.json", "");
    let known = version(&head);
    let (head, _) = get(address, "/runs.json", &format!("If-None-Match: {known}\r\n"));
    assert!(head.starts_with("HTTP/1.1 304 "), "{head}");
    write(place.path(), "log.jsonl", &(step(1, "3.0") + &step(2, "2.9")));
    let (head, body) = get(address, "/runs.json", &format!("If-None-Match: {known}\r\n"));
    assert!(head.starts_with("HTTP/1.1 200 ") && body.contains("2.9") && version(&head) != known, "{head}");
}

#[test]
fn the_page_is_one_file_whose_script_only_it_may_run() {
    let place = tempfile::tempdir().unwrap();
    let address = start(&[place.path().to_path_buf()]);
    let (head, page) = get(address, "/", "");
    let nonce = |text: &str, before: &str| {
        let rest = &text[text.find(before).expect(before) + before.len()..];
        rest[..32].to_owned()
    };
    let word = nonce(&head, "script-src 'nonce-");
    assert_eq!(nonce(&page, "<script nonce=\""), word);
    assert!(head.contains("default-src 'none'") && head.contains("connect-src 'self'"), "{head}");
    let (other, _) = get(address, "/", "");
    assert_ne!(nonce(&other, "script-src 'nonce-"), word);
    for outside in ["http://", "https://", "src=", "href=", "@import", "url(", "innerHTML", "eval("] {
        let found = page.matches(outside).count();
        // The one address is the name of SVG's namespace, which nothing is loaded from.
        let allowed = usize::from(outside == "http://");
        assert_eq!(found, allowed, "{outside}");
    }
    assert!(page.contains("prefers-color-scheme: dark"));
    let head_only = send(address, format!("HEAD / HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes());
    assert!(head_only.ends_with("\r\n\r\n") && head_only.starts_with("HTTP/1.1 200 OK"), "{head_only}");
}

#[test]
fn whatever_is_sent_is_answered_or_dropped_and_the_next_request_is_served() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("secret"), "secret").unwrap();
    let address = start(&[place.path().to_path_buf()]);
    let local = format!("Host: {address}\r\n\r\n");
    let head = |path: &str| format!("GET {path} HTTP/1.1\r\n{local}").into_bytes();
    for (request, status) in [
        (head("/secret"), "404"),
        (head("/../secret"), "404"),
        (head("/%2e%2e/secret"), "404"),
        (head("//etc/passwd"), "404"),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_vec(), "421"),
        (format!("POST / HTTP/1.1\r\n{local}").into_bytes(), "405"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n".to_vec(), "400"),
        (b"\r\n\r\n".to_vec(), "400"),
        (vec![b'A'; 1 << 20], "431"),
        ([b"GET / HTTP/1.1\r\nX: ".to_vec(), vec![0xff; 100], b"\r\n\r\n".to_vec()].concat(), "400"),
    ] {
        let answer = send(address, &request);
        // A server that refuses while the client still sends may reset the connection before its answer is read.
        let dropped = answer.is_empty() && request.len() > 8 << 10;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) || dropped, "{status}: {answer}");
        assert!(!answer.contains("secret"), "{answer}");
    }
    assert!(get(address, "/", "").0.starts_with("HTTP/1.1 200 OK"));
}

#[test]
fn silent_clients_are_dropped_and_do_not_keep_others_out() {
    let place = tempfile::tempdir().unwrap();
    let address = start(&[place.path().to_path_buf()]);
    let begin = Instant::now();
    let mut silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    for stream in &mut silent {
        stream.write_all(b"GET / HT").unwrap();
    }
    assert!(get(address, "/", "").0.starts_with("HTTP/1.1 200 OK"));
    for mut stream in silent {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(stream.read(&mut [0; 16]).unwrap_or(0), 0, "it is closed without an answer");
    }
    assert!(begin.elapsed() < Duration::from_secs(60));
}

#[test]
fn who_asks_takes_the_place_of_who_was_silent_for_longest() {
    let place = tempfile::tempdir().unwrap();
    let address = start(&[place.path().to_owned()]);
    let silent: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    for _ in 0..3 {
        assert!(get(address, "/", "").0.starts_with("HTTP/1.1 200 OK\r\n"));
    }
    drop(silent);
}

#[test]
fn damaged_requests_are_answered_with_a_status_or_dropped() {
    let address = start(&[]);
    let request =
        format!("GET /runs.json HTTP/1.1\r\nHost: {address}\r\nIf-None-Match: \"1\"\r\nAccept: */*\r\n");
    for seed in seeds(500) {
        let (mut random, mut bytes) = (Random(seed), request.clone().into_bytes());
        random.damage(&mut bytes);
        bytes.extend_from_slice(b"\r\n\r\n");
        let answer = send(address, &bytes);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 "), "seed {seed}: {answer}");
    }
    assert!(runs(address).is_empty());
}

/// A log of 100,000 steps of eight ranks; the loss jumps once.
fn long_log(steps: u64) -> String {
    let ranks: Vec<String> = (0..8)
        .map(|rank| {
            let (backward, wait) = if rank == 5 { (60.0, 0.0) } else { (30.0, 30.0) };
            format!(
                "{{\"forward_ms\":20.0,\"backward_ms\":{backward:?},\"wait_ms\":{wait:?},\"optimizer_ms\":5.0}}"
            )
        })
        .collect();
    let line = |at: u64| {
        let loss = if at == steps / 2 { "9.0" } else { "2.0" };
        let plain = step(at, loss);
        let plain = plain.trim_end().strip_suffix('}').unwrap();
        format!("{plain},\"ranks\":[{}]}}\n", ranks.join(","))
    };
    (1..=steps).map(line).collect()
}

#[test]
fn ranks_and_spikes_of_a_long_run_are_told_and_its_answer_stays_small() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    write(&folder, "log.jsonl", &long_log(100_000));
    let address = start(std::slice::from_ref(&folder));
    let found = runs(address);
    let ranks = found[0]["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 8);
    assert_eq!((&ranks[5]["backward_ms"], &ranks[4]["wait_ms"]), (&Value::from(60.0), &Value::from(30.0)));
    assert_eq!(found[0]["spikes"], serde_json::json!([50_000]));
    let bytes = found[0].to_string().len();
    assert!(bytes < 400_000, "{bytes} bytes for 100,000 steps");
}
