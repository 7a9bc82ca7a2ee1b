//! The chat page in a real browser: a person types, the model's answer streams in, and everything on the page works.
//!
//! Where there is no Chromium the tests are skipped.

use super::support::{LIMITS, Running, engine, families, model};
use ferrospeed_serve::server::ServerOptions;
use ferrospeed_testkit::browser::{Page, chromium};
use ferrospeed_testkit::skip::skip;

const ANSWERS: &str = "document.querySelectorAll('#talk .assistant').length";
const IDLE: &str = "!document.getElementById('send').disabled";

fn served(options: ServerOptions) -> Running {
    Running::start(engine(&model(&families()[0]), 200, LIMITS), options)
}

fn ask(page: &mut Page, text: &str) {
    page.value("document.getElementById('text').focus()");
    page.type_text(text);
    page.press_enter();
}

#[test]
fn a_talk_goes_on_over_several_turns_can_be_stopped_and_begun_anew() {
    let Some(chromium) = chromium() else { return skip("no Chromium") };
    let profile = tempfile::tempdir().unwrap();
    let server = served(ServerOptions::default());
    let mut page = Page::open(&chromium, profile.path(), &format!("http://{}/", server.address));
    page.wait_for("document.getElementById('model').textContent === 'tiny'");
    page.value("document.getElementById('tokens').value = 24");
    ask(&mut page, "<b>hello</b>");
    page.wait_for(&format!("{ANSWERS} === 1 && {IDLE}"));
    // What a person or a model says is text, whatever it looks like.
    assert_eq!(page.value("document.querySelector('#talk .user').textContent"), "<b>hello</b>");
    assert_eq!(page.value("document.querySelectorAll('#talk b, #talk script').length"), 0);
    assert_ne!(page.value("document.querySelector('#talk .assistant').textContent"), "");
    assert_eq!(
        page.value("document.getElementById('text').value"),
        "",
        "what was sent is gone from the field"
    );
    // The second question is put with all that was said before.
    ask(&mut page, "and again");
    page.wait_for(&format!("{ANSWERS} === 2 && {IDLE}"));
    assert_eq!(page.value("talk.map((message) => message.role).join()"), "user,assistant,user,assistant");
    // A line break is written with Shift; an empty message is not sent.
    ask(&mut page, "   ");
    assert_eq!(page.value("talk.length"), 4);
    page.value("document.getElementById('text').value = ''");

    // Stopped in the middle of a long answer, what came so far stays, and the server works for nobody.
    page.value("document.getElementById('tokens').value = 2000");
    ask(&mut page, "once more");
    page.wait_for(&format!(
        "{ANSWERS} === 3 && [...document.querySelectorAll('.assistant')].at(-1).textContent !== ''"
    ));
    page.value("document.getElementById('stop').click()");
    page.wait_for(IDLE);
    page.value("document.getElementById('clear').click()");
    page.wait_for(&format!("{ANSWERS} === 0 && talk.length === 0"));
    page.wait_for(
        "fetch('/metrics').then((reply) => reply.text()).then((text) => /running[^\\n]* 0\\n/.test(text))",
    );
    assert_eq!(page.value("document.getElementById('trouble').textContent"), "");
    // Nothing on the page came from anywhere else.
    let elsewhere = "performance.getEntriesByType('resource').filter((entry) => !entry.name.startsWith(location.origin)).length";
    assert_eq!(page.value(elsewhere), 0);
}

#[test]
fn a_key_that_is_missing_is_told_and_one_that_is_typed_is_used() {
    let Some(chromium) = chromium() else { return skip("no Chromium") };
    let profile = tempfile::tempdir().unwrap();
    let server = served(ServerOptions { api_keys: vec!["sesame".into()], ..ServerOptions::default() });
    let mut page = Page::open(&chromium, profile.path(), &format!("http://{}/", server.address));
    ask(&mut page, "hello");
    page.wait_for(&format!("document.getElementById('trouble').textContent !== '' && {IDLE}"));
    assert_eq!(page.value(ANSWERS), 0);
    page.value("document.getElementById('tokens').value = 24");
    page.value("document.getElementById('key').focus()");
    page.type_text("sesame");
    ask(&mut page, "hello");
    page.wait_for(&format!("{ANSWERS} === 1 && {IDLE}"));
    assert_eq!(page.value("document.getElementById('trouble').textContent"), "");
}
