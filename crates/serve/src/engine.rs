//! The thread that owns model, cache and scheduler, and answers requests until it is told to stop.
//!
//! Requests come through a bounded queue, events go back through one channel each. A client that drops its end is noticed
//! before the next pass, and its blocks are free again. Nothing here waits for a client.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::answer::Answer;
use crate::core::schedule::{Limits, Refusal, Scheduler, SequenceId, Share};
use crate::draft::Draft;
use crate::metrics::Metrics;
use crate::model::ModelFacts;
use crate::paired::Likelihoods;
use crate::request::{Event, Events, Request, Trouble, Work};
use crate::runner::{Runner, Said, Wish};
use crate::speculate::Speculation;
use crate::untold::{Ended, Untold};

/// How long an idle engine sleeps before it looks whether it should stop.
const IDLE: Duration = Duration::from_millis(100);

struct Submission {
    request: Request,
    events: Events,
    arrived: Instant,
}

/// A running engine.
#[derive(Debug)]
pub struct Engine {
    submissions: SyncSender<Submission>,
    facts: Arc<ModelFacts>,
    metrics: Arc<Metrics>,
    limits: Limits,
    /// Set once: requests that are not done by then are cut off, new ones refused.
    stop_at: Arc<OnceLock<Instant>>,
    /// Why nothing can be answered any more.
    lost: Arc<OnceLock<String>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts answering, without guesses.
    pub fn start(
        facts: Arc<ModelFacts>,
        runner: Runner,
        blocks: u32,
        limits: Limits,
    ) -> std::io::Result<Engine> {
        Engine::start_guessing(facts, runner, blocks, limits, Speculation::Off)
    }

    /// Starts answering.
    pub fn start_guessing(
        facts: Arc<ModelFacts>,
        runner: Runner,
        blocks: u32,
        limits: Limits,
        speculation: Speculation,
    ) -> std::io::Result<Engine> {
        Engine::start_with(facts, runner, blocks, limits, speculation, None)
    }

    /// Starts answering, with guesses of a smaller model.
    pub fn start_drafting(
        facts: Arc<ModelFacts>,
        runner: Runner,
        blocks: u32,
        limits: Limits,
        draft: Draft,
    ) -> std::io::Result<Engine> {
        Engine::start_with(facts, runner, blocks, limits, Speculation::Off, Some(draft))
    }

    fn start_with(
        facts: Arc<ModelFacts>,
        runner: Runner,
        blocks: u32,
        limits: Limits,
        speculation: Speculation,
        draft: Option<Draft>,
    ) -> std::io::Result<Engine> {
        let limits = Limits { sequence_tokens: limits.sequence_tokens.min(facts.longest), ..limits };
        if runner.keeps_texts() && (speculation != Speculation::Off || draft.is_some()) {
            let why = "a model with layers in linear time cannot take back a token that was guessed; serve it without --speculate";
            return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, why));
        }
        let scheduler = runner.scheduler(limits, blocks);
        let limits = scheduler.limits();
        let metrics = Arc::new(Metrics::default());
        metrics.blocks.store(u64::from(blocks), Relaxed);
        let (submissions, inbox) = sync_channel(limits.waiting);
        let (stop_at, lost) = (Arc::new(OnceLock::new()), Arc::new(OnceLock::new()));
        let worker = Worker {
            runner,
            scheduler,
            inbox,
            answers: BTreeMap::new(),
            untold: Untold::default(),
            facts: Arc::clone(&facts),
            metrics: Arc::clone(&metrics),
            stop_at: Arc::clone(&stop_at),
            lost: Arc::clone(&lost),
            speculation,
            draft,
        };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || worker.run())?;
        Ok(Engine { submissions, facts, metrics, limits, stop_at, lost, thread: Mutex::new(Some(thread)) })
    }

    /// What is known of the model.
    pub fn facts(&self) -> &Arc<ModelFacts> {
        &self.facts
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What bounds the work.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether requests are answered.
    pub fn is_alive(&self) -> bool {
        self.stop_at.get().is_none()
            && self
                .thread
                .lock()
                .is_ok_and(|thread| thread.as_ref().is_some_and(|thread| !thread.is_finished()))
    }

    /// Why nothing can be answered any more, where a rank that holds a part of the model is lost.
    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Hands a request over; what becomes of it arrives as events. Dropping their receiver takes it back.
    pub fn submit(&self, request: Request, events: Events) {
        let trouble = |events: &Events, trouble| {
            self.metrics.refused.fetch_add(1, Relaxed);
            // A client that is gone needs no word.
            let _ = events.send(Event::Trouble(trouble));
        };
        if self.stop_at.get().is_some() {
            return trouble(&events, Trouble::ShuttingDown);
        }
        match self.submissions.try_send(Submission { request, events, arrived: Instant::now() }) {
            Ok(()) => {}
            Err(TrySendError::Full(back)) => {
                let waiting = self.limits.waiting;
                trouble(&back.events, Trouble::Refused(Refusal::QueueFull { waiting }));
            }
            Err(TrySendError::Disconnected(back)) => {
                trouble(&back.events, Trouble::Failed("the engine has ended".into()));
            }
        }
    }

    /// Hands a request over; what becomes of it can be waited for.
    pub fn ask(&self, request: Request) -> Replies {
        let (events, replies) = unbounded_channel();
        self.submit(request, events);
        Replies(replies)
    }

    /// Takes no more requests, lets those that run go on until `deadline`, and ends.
    pub fn stop(&self, deadline: Instant) {
        // Whoever comes first decides.
        let _ = self.stop_at.set(deadline);
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread has panicked");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop(Instant::now());
    }
}

/// What the engine tells of a request, for callers that may wait. Dropping it takes the request back.
#[derive(Debug)]
pub struct Replies(UnboundedReceiver<Event>);

impl Iterator for Replies {
    type Item = Event;

    /// Waits, at most until the request's deadline. Must not be called inside an asynchronous task.
    fn next(&mut self) -> Option<Event> {
        self.0.blocking_recv()
    }
}

struct Worker {
    runner: Runner,
    scheduler: Scheduler,
    inbox: Receiver<Submission>,
    answers: BTreeMap<SequenceId, Answer>,
    untold: Untold,
    facts: Arc<ModelFacts>,
    metrics: Arc<Metrics>,
    stop_at: Arc<OnceLock<Instant>>,
    lost: Arc<OnceLock<String>>,
    speculation: Speculation,
    draft: Option<Draft>,
}

impl Worker {
    fn run(mut self) {
        loop {
            if !self.take_in() {
                break;
            }
            self.drop_departed();
            let drafted = self.drafted();
            let (answers, speculation) = (&self.answers, self.speculation);
            let plan = self.scheduler.plan_guessing(|id, tokens, most| match answers.get(&id) {
                Some(answer) if answer.may_guess() => match &drafted {
                    Some(drafted) => {
                        drafted.get(&id).map_or(&[][..], Vec::as_slice).iter().take(most).copied().collect()
                    }
                    None => speculation.guess(tokens, most),
                },
                _ => Vec::new(),
            });
            if !plan.is_empty() {
                self.pass(&plan);
            } else if let Err(error) = self.runner.stay() {
                let _ = self.lost.set(error.to_string());
            }
            if self.lost.get().is_some() {
                break;
            }
            // What the next pass would give time for, where there is one.
            if plan.is_empty() || self.answers.is_empty() || !self.runner.computes_beside() {
                self.tell_untold();
            }
            self.tell_load();
        }
        self.tell_untold();
        let ids: Vec<SequenceId> = self.answers.keys().copied().collect();
        ids.into_iter().for_each(|id| self.give_up(id, Trouble::ShuttingDown));
        while let Ok(late) = self.inbox.try_recv() {
            let _ = late.events.send(Event::Trouble(Trouble::ShuttingDown));
        }
        self.tell_load();
    }

    /// Takes what has arrived; waits a little when there is nothing else to do. `false` when it is time to end.
    fn take_in(&mut self) -> bool {
        loop {
            let stop_at = self.stop_at.get();
            if stop_at.is_some_and(|&at| self.answers.is_empty() || Instant::now() >= at) {
                return false;
            }
            let next = if self.answers.is_empty() {
                self.inbox.recv_timeout(IDLE)
            } else {
                self.inbox.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                })
            };
            match next {
                Ok(submission) => self.admit(submission),
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return !self.answers.is_empty(),
            }
        }
    }

    fn admit(&mut self, submission: Submission) {
        let Submission { request, events, arrived } = submission;
        let prompt_tokens = request.prompt.len();
        let room = self.scheduler.limits().sequence_tokens.saturating_sub(prompt_tokens);
        let (count, new_tokens) = match &request.work {
            Work::Generate { answers, max_tokens, .. } => (answers.len(), max_tokens.unwrap_or(room).max(1)),
            Work::Embed | Work::Score { .. } => (1, 0),
        };
        // The row before the first token that is scored says how likely that is.
        let own_from = match &request.work {
            Work::Score { from, .. } => from.saturating_sub(1),
            _ => usize::MAX,
        };
        match self.scheduler.submit_own(&request.prompt, new_tokens, count, own_from) {
            Ok(ids) => {
                self.metrics.requests.fetch_add(1, Relaxed);
                self.metrics.prompt_tokens.fetch_add(prompt_tokens as u64, Relaxed);
                for (index, id) in ids.into_iter().enumerate() {
                    self.answers.insert(id, Answer::new(&request, index, events.clone(), arrived));
                }
            }
            Err(refusal) => {
                self.metrics.refused.fetch_add(1, Relaxed);
                let _ = events.send(Event::Trouble(Trouble::Refused(refusal)));
            }
        }
    }

    /// Ends what nobody waits for any more, and what has waited too long.
    fn drop_departed(&mut self) {
        let now = Instant::now();
        let gone: Vec<SequenceId> =
            self.answers.iter().filter(|(_, answer)| answer.is_departed()).map(|(&id, _)| id).collect();
        for id in gone {
            self.metrics.cancelled.fetch_add(1, Relaxed);
            self.end(id);
        }
        let late: Vec<SequenceId> =
            self.answers.iter().filter(|(_, answer)| answer.deadline() <= now).map(|(&id, _)| id).collect();
        late.into_iter().for_each(|id| self.give_up(id, Trouble::TimedOut));
    }

    /// What the smaller model guesses for texts that grow; `None` where there is none. One that fails is not asked again: answers
    /// do not need it.
    fn drafted(&mut self) -> Option<HashMap<SequenceId, Vec<i64>>> {
        let draft = self.draft.as_mut()?;
        let may = self.answers.iter().filter(|(_, answer)| answer.may_guess());
        let texts: Vec<(SequenceId, &[i64])> = may
            .filter_map(|(&id, _)| self.scheduler.sequence(id).map(|sequence| (id, sequence)))
            .filter(|(_, sequence)| sequence.is_growing())
            .map(|(id, sequence)| (id, sequence.tokens()))
            .collect();
        match draft.guess(&texts) {
            Ok(guesses) => Some(guesses),
            Err(error) => {
                tracing::error!("the draft model fails and is not asked again: {error}");
                self.draft = None;
                None
            }
        }
    }

    /// Tells clients of all tokens that were chosen.
    fn tell_untold(&mut self) {
        let ended = self.untold.tell(&mut self.answers, &self.facts.codec, &self.metrics);
        self.settle(ended);
    }

    /// Ends what telling has ended.
    fn settle(&mut self, ended: Vec<Ended>) {
        for Ended { id, failure } in ended {
            match failure {
                Some(why) => self.give_up(id, Trouble::Failed(why)),
                None => {
                    self.metrics.finished.fetch_add(1, Relaxed);
                    self.end(id);
                }
            }
        }
    }

    fn give_up(&mut self, id: SequenceId, trouble: Trouble) {
        self.tell_untold();
        if let Some(answer) = self.answers.get(&id) {
            self.metrics.failed.fetch_add(1, Relaxed);
            answer.tell(Event::Trouble(trouble));
        }
        self.end(id);
    }

    fn end(&mut self, id: SequenceId) {
        self.scheduler.end(id);
        self.answers.remove(&id);
        if let Some(draft) = &mut self.draft {
            draft.forget(id);
        }
    }

    fn pass(&mut self, plan: &[Share]) {
        let begun = Instant::now();
        let of = |share: &Share| self.answers.get(&share.id).map_or(Wish::Likeliest, Answer::wish);
        let wishes: HashMap<SequenceId, Wish> = plan.iter().map(|share| (share.id, of(share))).collect();
        let (answers, untold, mut ended) = (&mut self.answers, &mut self.untold, Vec::new());
        let tell = || ended = untold.tell(answers, &self.facts.codec, &self.metrics);
        let passed = self.runner.pass(&self.scheduler, plan, |share| wishes[&share.id], tell);
        let result = match passed {
            Ok(result) => result,
            Err(error) => {
                tracing::error!("a pass over {} sequences failed: {error}", plan.len());
                if self.runner.is_lost() {
                    let _ = self.lost.set(error.to_string());
                }
                self.settle(ended);
                plan.iter().for_each(|share| self.give_up(share.id, Trouble::Failed(error.to_string())));
                return;
            }
        };
        self.metrics.passed(plan.iter().map(|share| share.count).sum(), begun.elapsed());
        let (mut next, mut hidden) = (result.next.into_iter(), result.hidden.into_iter());
        let mut known = result.known.into_iter();
        for share in plan {
            self.scheduler.computed(share);
            if let Wish::Known { from, .. } = wishes[&share.id] {
                self.learn(share, share.first.max(from - 1), known.next().unwrap_or_default());
                continue;
            }
            if !share.chooses {
                continue;
            }
            if wishes[&share.id] == Wish::Hidden {
                let values = hidden.next().unwrap_or_default();
                if let Some(answer) = self.answers.get(&share.id) {
                    answer.embed(values);
                    self.metrics.finished.fetch_add(1, Relaxed);
                }
                self.end(share.id);
                continue;
            }
            let rows: Vec<Said> = next.by_ref().take(1 + share.guessed).collect();
            self.metrics.guessed_tokens.fetch_add(share.guessed as u64, Relaxed);
            // What a stop string has ended meanwhile has no next token.
            if ended.iter().all(|ended| ended.id != share.id) {
                self.choose(share.id, &rows);
            }
        }
        self.settle(ended);
    }

    /// Takes what a share's rows from `row` on say of the tokens that follow them, and tells all where it was the last.
    fn learn(&mut self, share: &Share, row: usize, known: Vec<Likelihoods>) {
        let Some(answer) = self.answers.get_mut(&share.id) else { return };
        if let Err(why) = answer.learn(row, known) {
            return self.give_up(share.id, Trouble::Failed(why));
        }
        if share.chooses {
            answer.score();
            self.metrics.finished.fetch_add(1, Relaxed);
            self.end(share.id);
        }
    }

    /// Chooses the next token of an answer, and those behind it for as long as they are what was guessed. `rows` has what
    /// may follow the last known token and every guess.
    fn choose(&mut self, id: SequenceId, rows: &[Said]) {
        for (place, row) in rows.iter().enumerate() {
            let (Some(answer), Some(sequence)) = (self.answers.get_mut(&id), self.scheduler.sequence(id))
            else {
                return;
            };
            self.metrics.accepted_tokens.fetch_add(u64::from(place > 0), Relaxed);
            let (tokens, most) = (sequence.tokens(), sequence.most_tokens());
            let chosen = match answer.choose(row, tokens, most, &self.metrics) {
                Ok(chosen) => chosen,
                Err(why) => return self.give_up(id, Trouble::Failed(why)),
            };
            if chosen.finish.is_some() {
                let completed = self.answers.remove(&id);
                self.untold.add(id, chosen, completed);
                return self.end(id);
            }
            let token = chosen.token;
            self.untold.add(id, chosen, None);
            if !self.scheduler.push(id, token) {
                return;
            }
        }
    }

    fn tell_load(&self) {
        let (running, waiting) = self.scheduler.load();
        let (pool, counters) = (self.scheduler.pool(), self.scheduler.counters());
        let metrics = &self.metrics;
        metrics.running.store(running as u64, Relaxed);
        metrics.waiting.store(waiting as u64, Relaxed);
        metrics.blocks_held.store(pool.held() as u64, Relaxed);
        metrics.evictions.store(pool.evictions(), Relaxed);
        metrics.preemptions.store(counters.preemptions, Relaxed);
        metrics.shared_tokens.store(counters.shared_tokens, Relaxed);
    }
}
