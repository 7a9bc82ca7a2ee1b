//! A real browser that a test drives: headless Chromium, spoken to over the pipes of its DevTools protocol.
//!
//! `FERROSPEED_CHROMIUM` names one; otherwise it is `chromium` or `google-chrome` of the `PATH`. Every wait has a deadline.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long the browser may take for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where Chromium is, if it is.
pub fn chromium() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("FERROSPEED_CHROMIUM") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found = std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name)));
    found.into_iter().find(|program| program.is_file())
}

/// A page in a browser; dropping it ends the browser.
pub struct Page {
    process: Child,
    commands: std::io::PipeWriter,
    answers: Receiver<Value>,
    session: Value,
    sent: u64,
}

impl Page {
    /// Opens a page. `profile` is a folder of the browser's own.
    ///
    /// # Panics
    /// When the browser does not do as it should; so does every method.
    pub fn open(chromium: &Path, profile: &Path, url: &str) -> Page {
        let (their_commands, commands) = std::io::pipe().unwrap();
        let (their_answers, answers) = std::io::pipe().unwrap();
        // The protocol is spoken on the descriptors 3 and 4; a shell puts the pipes there.
        let mut process = Command::new("sh")
            .args(["-c", "exec 3<&0 4>&1 </dev/null >/dev/null; exec \"$@\"", "sh"])
            .arg(chromium)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .arg("--remote-debugging-pipe")
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::from(OwnedFd::from(their_commands)))
            .stdout(Stdio::from(OwnedFd::from(answers)))
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", chromium.display()));
        let (tell, answers) = channel();
        std::thread::spawn(move || {
            let mut pipe = BufReader::new(their_answers);
            let mut message = Vec::new();
            while pipe.read_until(0, &mut message).is_ok_and(|read| read > 0) {
                message.pop();
                let value = serde_json::from_slice(&message).unwrap_or_default();
                message.clear();
                if tell.send(value).is_err() {
                    return;
                }
            }
        });
        if let Ok(Some(status)) = process.try_wait() {
            panic!("{} ended at once: {status}", chromium.display());
        }
        let mut page = Page { process, commands, answers, session: Value::Null, sent: 0 };
        let target = page.call("Target.createTarget", json!({"url": url}))["targetId"].clone();
        let attached = page.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        page.session = attached["sessionId"].clone();
        page.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'");
        page
    }

    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.sent += 1;
        let mut message = json!({"id": self.sent, "method": method, "params": parameters});
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.commands.write_all(&bytes).unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = self.answers.recv_timeout(left);
            let answer =
                answer.unwrap_or_else(|error| panic!("the browser does not answer {method}: {error}"));
            if answer["id"] == self.sent {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
        }
    }

    /// The value of an expression of the page's script.
    pub fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn wait_for(&mut self, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.value(expression) != true {
            if Instant::now() > deadline {
                let page = self.value("document.body.innerText");
                panic!("it never came to {expression}; the page says {page}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Types into what has the focus, as a person does.
    pub fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Presses Enter.
    pub fn press_enter(&mut self) {
        for kind in ["keyDown", "keyUp"] {
            let key = json!({"type": kind, "key": "Enter", "code": "Enter", "text": "\r",
                             "windowsVirtualKeyCode": 13});
            self.call("Input.dispatchKeyEvent", key);
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
