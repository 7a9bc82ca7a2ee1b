//! This rank's membership in a job.
//!
//! A [`World`] knows its rank, keeps the connection to the others, hands out groups and registered memory, and notices
//! when a rank is lost. Clones share one membership; when the last clone and the last group are dropped the rank leaves.

use std::net::{IpAddr, Ipv4Addr};
use std::panic::Location;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::auth::JobKey;
use crate::backend::hierarchical::{HierarchicalCarrier, Place};
use crate::backend::local::{LocalCarrier, Patience};
use crate::backend::message::{Link, MessageCarrier};
use crate::backend::nccl::{self, DeviceStream, NcclCarrier};
use crate::backend::tcp::{Endpoint, TcpLink};
use crate::backend::{Carrier, Membership};
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::logger::CommLog;
use crate::recorder::Recorder;
use crate::rendezvous::Backend;
use crate::segment::{Registered, SegmentTable};
use crate::state::JobState;
use crate::store::{MemoryStore, Store};

mod connect;
mod memory;

/// Bytes of staging that a group has by default, whatever the message size.
pub const DEFAULT_STAGING_BYTES: usize = 8 << 20;
/// How long an operation waits for its peers by default: `DEEPSPEED_TIMEOUT`'s default of 30 minutes.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// How long GPUs have to find each other by NCCL.
const LONGEST_CONNECTING: Duration = Duration::from_secs(120);
/// Marks the number of the group through which the ranks of another agree on what their GPUs do.
const DEVICE_GROUP_BIT: u64 = 1 << 30;
/// Marks the number of a group's part on one host.
const HOST_GROUP_BIT: u64 = 1 << 62;

/// What a job's members have in common, besides the way they met.
#[derive(Debug, Clone)]
pub struct Limits {
    /// How long every operation waits for its peers.
    pub deadline: Duration,
    /// Bytes of staging per group.
    pub staging_bytes: usize,
    /// Where the flight recorder is written when an operation fails; nowhere when absent.
    pub trace_folder: Option<PathBuf>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { deadline: DEFAULT_DEADLINE, staging_bytes: DEFAULT_STAGING_BYTES, trace_folder: None }
    }
}

/// A rank's membership in a job.
#[derive(Clone)]
pub struct World {
    pub(crate) inner: Arc<WorldInner>,
    group: Group,
}

/// What every group of a rank shares.
pub(crate) struct WorldInner {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// World ranks of each host, this rank's host first found by membership.
    hosts: Vec<Vec<usize>>,
    backend: Backend,
    /// Where peers reach this rank by `tcp`, in jobs that use it.
    endpoint: Option<Arc<Endpoint>>,
    /// The MPI library, in jobs that use it.
    #[cfg(feature = "mpi")]
    mpi: Option<Arc<crate::backend::mpi::Session>>,
    pub(crate) limits: Limits,
    pub(crate) state: Arc<JobState>,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) log: CommLog,
    store: Arc<dyn Store>,
    segments: Arc<SegmentTable>,
    next_group_id: AtomicU64,
    /// Where this rank's GPU takes its work, once it is known that NCCL can connect all of them.
    device: OnceLock<DeviceStream>,
    departure: Box<dyn Fn() + Send + Sync>,
}

impl Drop for WorldInner {
    fn drop(&mut self) {
        (self.departure)();
    }
}

impl World {
    /// A job of one rank: every operation is a copy.
    ///
    /// # Panics
    /// When the kernel refuses shared memory; see [`World::try_solo`].
    pub fn solo() -> World {
        let mut worlds = World::threads(1);
        worlds.remove(0)
    }

    /// As [`World::solo`], with the kernel's refusal as an error.
    pub fn try_solo() -> Result<World> {
        Ok(World::threads_within(1, &Limits::default())?.remove(0))
    }

    /// A job of `size` ranks that are threads of this process, over the same algorithms as processes of one host.
    ///
    /// # Panics
    /// When the kernel refuses shared memory or `size` is 0.
    pub fn threads(size: usize) -> Vec<World> {
        World::threads_within(size, &Limits::default())
            .unwrap_or_else(|error| panic!("a job of {size} threads: {error}"))
    }

    /// Runs `work` on every rank of such a job, and gives what each made of it, in order of rank: a program tries so what it does
    /// on several ranks, without a launcher.
    ///
    /// ```
    /// use ferrospeed_comm::{ReduceOp, World};
    ///
    /// let sums = World::on_threads(3, |world| {
    ///     let mut sum = [world.rank() as i64];
    ///     world.group().all_reduce(&mut sum, ReduceOp::Sum).map(|()| sum[0])
    /// });
    /// assert!(sums.into_iter().all(|sum| sum.is_ok_and(|sum| sum == 3)));
    /// ```
    ///
    /// # Panics
    /// As [`World::threads`], and when `work` does.
    pub fn on_threads<R: Send>(size: usize, work: impl Fn(World) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let (worlds, work) = (World::threads(size).into_iter(), &work);
            let threads: Vec<_> = worlds.map(|world| scope.spawn(move || work(world))).collect();
            let ended = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
            ended.map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }

    /// As [`World::threads`], with other limits.
    pub fn threads_within(size: usize, limits: &Limits) -> Result<Vec<World>> {
        World::threads_on(&[size], limits)
    }

    /// As [`World::threads_within`], for ranks that behave as if they were on several hosts, `hosts[i]` of them on host
    /// `i`: between those they talk through sockets of this machine.
    pub fn threads_on(hosts: &[usize], limits: &Limits) -> Result<Vec<World>> {
        let size = hosts.iter().sum();
        if size == 0 {
            return Err(Error::rendezvous("a job needs at least one rank"));
        }
        let mut next = 0..size;
        let hosts: Vec<Vec<usize>> = hosts.iter().map(|count| next.by_ref().take(*count).collect()).collect();
        let backend = if hosts.len() > 1 { Backend::Auto } else { Backend::Local };
        let state = Arc::new(JobState::new(size));
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        std::thread::scope(|scope| {
            let members: Vec<_> = (0..size)
                .map(|rank| {
                    let (departed, shared_state) = (Arc::clone(&state), Arc::clone(&state));
                    let (store, limits, hosts) = (Arc::clone(&store), limits.clone(), hosts.clone());
                    scope.spawn(move || {
                        let parts = WorldParts {
                            rank,
                            hosts,
                            backend,
                            limits,
                            key: JobKey::of_token(""),
                            address: Ipv4Addr::LOCALHOST.into(),
                            state: shared_state,
                            store,
                            departure: Box::new(move || departed.note_left(rank)),
                        };
                        World::assemble(parts)
                    })
                })
                .collect();
            members
                .into_iter()
                .map(|member| member.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }

    /// A job of one rank, which says what it was asked to be carried by.
    pub(crate) fn alone(backend: Backend, limits: &Limits) -> Result<World> {
        let state = Arc::new(JobState::new(1));
        let departed = Arc::clone(&state);
        World::assemble(WorldParts {
            rank: 0,
            hosts: vec![vec![0]],
            backend,
            limits: limits.clone(),
            key: JobKey::of_token(""),
            address: Ipv4Addr::LOCALHOST.into(),
            state,
            store: Arc::new(MemoryStore::default()),
            departure: Box::new(move || departed.note_left(0)),
        })
    }

    /// Says where this rank's GPU takes its work, and finds out whether NCCL can connect the ranks: then
    /// [`Group::on_devices`](crate::Group::on_devices) has an answer.
    ///
    /// It can where each rank has a GPU of its own and NCCL is installed; otherwise ranks exchange a GPU's memory through the
    /// host's. Where `nccl` was asked for by name that is an error on all, and where another backend was, NCCL is not tried.
    /// Every rank must call it.
    pub fn attach_device(&self, stream: Option<DeviceStream>) -> Result<()> {
        let is_wanted = match self.inner.backend {
            Backend::Nccl => true,
            Backend::Auto => self.size() > 1 && stream.is_some(),
            _ => false,
        };
        if !is_wanted || self.inner.device.get().is_some() {
            return Ok(());
        }
        // What every rank has: a byte for whether it can, and the identity of its GPU.
        let own = stream.map(nccl::identity);
        let mut card = [0u8; 17];
        if let Some(Ok(identity)) = &own {
            card[0] = 1;
            card[1..].copy_from_slice(identity);
        }
        let mut cards = vec![0u8; card.len() * self.size()];
        self.group.all_gather(&card, &mut cards)?;
        let problem = match own {
            Some(Err(error)) => Some(error.to_string()),
            _ => why_not(cards.chunks(card.len())),
        };
        match (problem, stream) {
            (None, Some(stream)) => {
                // A second attachment finds the first one's.
                let _ = self.inner.device.set(stream);
                Ok(())
            }
            (problem, _) if self.inner.backend == Backend::Nccl => {
                let problem = problem.unwrap_or_else(|| "this rank has no GPU".to_owned());
                Err(Error::Backend { backend: "nccl", problem })
            }
            (problem, _) => {
                if self.rank() == 0 {
                    let why = problem.unwrap_or_default();
                    tracing::info!("the GPUs' memory is exchanged through the host's: {why}");
                }
                Ok(())
            }
        }
    }

    /// Builds the membership once the ranks know each other.
    pub(crate) fn assemble(parts: WorldParts) -> Result<World> {
        let size = parts.hosts.iter().map(Vec::len).sum();
        let uses_tcp = match parts.backend {
            Backend::Tcp => true,
            Backend::Auto | Backend::Nccl => parts.hosts.len() > 1,
            Backend::Local | Backend::Mpi => false,
        };
        #[cfg(feature = "mpi")]
        let mpi = (parts.backend == Backend::Mpi)
            .then(|| crate::backend::mpi::Session::open(parts.rank, size, Arc::clone(&parts.state)))
            .transpose()?;
        #[cfg(not(feature = "mpi"))]
        if parts.backend == Backend::Mpi {
            let problem = "this build has no MPI; build it with the cargo feature `mpi`".into();
            return Err(Error::Backend { backend: "mpi", problem });
        }
        let open = || Endpoint::open(parts.key.clone(), parts.rank, parts.address, Arc::clone(&parts.store));
        let inner = Arc::new(WorldInner {
            rank: parts.rank,
            size,
            endpoint: uses_tcp.then(open).transpose()?,
            #[cfg(feature = "mpi")]
            mpi,
            hosts: parts.hosts,
            backend: parts.backend,
            limits: parts.limits,
            state: parts.state,
            recorder: Arc::new(Recorder::new(parts.rank)),
            log: CommLog::default(),
            store: parts.store,
            segments: Arc::default(),
            next_group_id: AtomicU64::new(0),
            device: OnceLock::new(),
            departure: parts.departure,
        });
        let everyone: Vec<usize> = (0..size).collect();
        let group = inner.connect_group(&everyone, "world".to_owned())?;
        let group = group.ok_or_else(|| Error::rendezvous("this rank is not in its own world"))?;
        Ok(World { inner, group })
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// The group of all ranks.
    pub fn group(&self) -> Group {
        self.group.clone()
    }

    /// The world ranks of each host, hosts in the order of their lowest rank.
    pub fn hosts(&self) -> &[Vec<usize>] {
        &self.inner.hosts
    }

    /// This rank's number among the ranks of its host.
    pub fn local_rank(&self) -> usize {
        let host = self.inner.my_host();
        host.iter().position(|rank| *rank == self.inner.rank).unwrap_or(0)
    }

    /// The flight recorder of this rank.
    pub fn recorder(&self) -> &Recorder {
        &self.inner.recorder
    }

    /// Says where each rank is on a mesh, for messages.
    pub(crate) fn tell_places(&self, places: Vec<String>) {
        self.inner.state.set_places(places);
    }

    /// The communication logger of this rank; off until it is started.
    pub fn log(&self) -> &CommLog {
        &self.inner.log
    }

    /// Makes a group of the given world ranks, in the given order; `None` on ranks that are not in it.
    ///
    /// Every rank of the world must call this for every group, in the same order, members or not.
    #[track_caller]
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Group>> {
        self.named_group(ranks, None)
    }

    /// As [`World::new_group`], with a name for messages and reports.
    #[track_caller]
    pub fn named_group(&self, ranks: &[usize], name: Option<&str>) -> Result<Option<Group>> {
        let call_site = Location::caller();
        let refuse = |problem: String| Error::InvalidArgument {
            operation: "new_group",
            problem,
            call_site: call_site.to_string(),
        };
        if ranks.is_empty() {
            return Err(refuse("a group needs at least one rank".into()));
        }
        for (index, rank) in ranks.iter().enumerate() {
            if *rank >= self.size() {
                return Err(refuse(format!("rank {rank} is not in a world of {}", self.size())));
            }
            if ranks[..index].contains(rank) {
                return Err(refuse(format!("rank {rank} is named twice in {ranks:?}")));
            }
        }
        let name = name.map_or_else(|| format!("{ranks:?}"), str::to_owned);
        self.inner.connect_group(ranks, name)
    }

    /// Memory that all ranks of the host map: [`Group::allocate`] of [`World::group`].
    pub fn allocate(&self, bytes: usize) -> Result<Registered> {
        self.group.allocate(bytes)
    }

    /// Memory that all ranks of the host have in common: [`Group::allocate_shared`] of [`World::group`].
    pub fn allocate_shared(&self, bytes: usize) -> Result<Registered> {
        self.group.allocate_shared(bytes)
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "World(rank {} of {})", self.rank(), self.size())
    }
}

/// Why ranks with these cards (see [`World::attach_device`]) cannot use NCCL.
fn why_not<'a>(cards: impl Iterator<Item = &'a [u8]>) -> Option<String> {
    let mut seen: Vec<&[u8]> = Vec::new();
    for (rank, card) in cards.enumerate() {
        if card[0] == 0 {
            return Some(format!("rank {rank} has no GPU, or no NCCL"));
        }
        // NCCL's own switch, for those who try things out on one GPU.
        let may_share = std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value == "1");
        if let Some(other) = seen.iter().position(|known| *known == card).filter(|_| !may_share) {
            return Some(format!("ranks {other} and {rank} share a GPU, and NCCL wants one each"));
        }
        seen.push(card);
    }
    None
}

/// What the different ways of meeting produce.
pub(crate) struct WorldParts {
    pub(crate) rank: usize,
    pub(crate) hosts: Vec<Vec<usize>>,
    pub(crate) backend: Backend,
    pub(crate) limits: Limits,
    /// What the job's ranks know each other by.
    pub(crate) key: JobKey,
    /// The address at which this host is known to the others.
    pub(crate) address: IpAddr,
    pub(crate) state: Arc<JobState>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) departure: Box<dyn Fn() + Send + Sync>,
}

impl WorldInner {
    /// Writes the flight recorder when an operation failed, and says where.
    pub(crate) fn dump_trace(&self, cause: &Error) {
        let Some(folder) = &self.limits.trace_folder else { return };
        match self.recorder.dump(folder) {
            Ok(path) => tracing::error!("rank {}: {cause}; flight recorder in {}", self.rank, path.display()),
            Err(error) => tracing::error!("rank {}: {cause}; and then {error}", self.rank),
        }
    }

    pub(crate) fn my_host(&self) -> &[usize] {
        self.hosts.iter().find(|host| host.contains(&self.rank)).map_or(&[], Vec::as_slice)
    }
}
