//! How the ranks of a group are connected: through memory, sockets, both, or their GPUs.

use super::*;

impl WorldInner {
    /// How a rank looks out for others before it sleeps. Spinning is useful only while every rank of the host has a core to
    /// itself; else a core is offered to the others each time.
    pub(super) fn patience(&self) -> Patience {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (limit_us, looks) = if self.my_host().len() <= cores { (30, 64) } else { (50, 1) };
        Patience { limit: Duration::from_micros(limit_us), looks }
    }

    pub(super) fn membership(
        &self,
        group_id: u64,
        group_name: String,
        ranks: &[usize],
        me: usize,
    ) -> Membership {
        let host = self.my_host();
        Membership {
            group_id,
            group_name,
            ranks: ranks.into(),
            me,
            is_far: ranks.iter().map(|rank| !host.contains(rank)).collect(),
            state: Arc::clone(&self.state),
        }
    }

    pub(super) fn connect_local(&self, membership: Membership, deadline: Instant) -> Result<LocalCarrier> {
        LocalCarrier::connect(
            membership,
            Arc::clone(&self.segments),
            &*self.store,
            self.limits.staging_bytes,
            self.patience(),
            deadline,
        )
    }

    pub(super) fn connect_group(self: &Arc<Self>, ranks: &[usize], name: String) -> Result<Option<Group>> {
        let group_id = self.next_group_id.fetch_add(1, Ordering::Relaxed);
        let Some(me) = ranks.iter().position(|rank| *rank == self.rank) else { return Ok(None) };
        self.connect_members(self.membership(group_id, name, ranks, me)).map(Some)
    }

    /// A group's ranks over the memory of their GPUs; `None` where NCCL does not connect them. All of them must call it.
    pub(crate) fn connect_devices(self: &Arc<Self>, group: &Membership) -> Result<Option<Group>> {
        let Some(stream) = self.device.get() else { return Ok(None) };
        let deadline = Instant::now() + self.limits.deadline.min(LONGEST_CONNECTING);
        let name = format!("{} on GPUs", group.group_name);
        let host = self.membership(DEVICE_GROUP_BIT | group.group_id, name, &group.ranks, group.me);
        let host = self.connect_members(host)?;
        let mut id = [0u8; nccl::ID_BYTES];
        // Without a name nobody can join; all find out below.
        let named = if host.rank() == 0 { nccl::new_id().map(|made| id = made) } else { Ok(()) };
        host.broadcast(&mut id, 0)?;
        let membership = host.membership();
        let joined = named
            .and_then(|()| NcclCarrier::connect(membership.clone(), host.carrier(), *stream, id, deadline));
        // One that could not join keeps all others from it.
        let mut failed = [u8::from(joined.is_err())];
        host.all_reduce(&mut failed, ReduceOp::Max)?;
        match joined {
            Ok(carrier) if failed == [0] => {
                Ok(Some(Group::new(Arc::clone(self), membership, Arc::new(carrier))))
            }
            Err(error) if self.backend == Backend::Nccl => Err(error),
            Ok(_) if self.backend == Backend::Nccl => {
                let problem = "another rank could not join the communicator".to_owned();
                Err(Error::Backend { backend: "nccl", problem })
            }
            joined => {
                if let Err(error) = joined {
                    let rank = self.rank;
                    tracing::warn!(
                        "rank {rank}: {error}; the GPUs' memory is exchanged through the host's (set FERROSPEED_COMM_BACKEND=nccl to make this an error)"
                    );
                }
                Ok(None)
            }
        }
    }

    pub(super) fn connect_members(self: &Arc<Self>, membership: Membership) -> Result<Group> {
        let ranks = Arc::clone(&membership.ranks);
        let deadline = Instant::now() + self.limits.deadline;
        let one_host = self.hosts.iter().any(|host| ranks.iter().all(|rank| host.contains(rank)));
        #[cfg(feature = "mpi")]
        if let Some(session) = &self.mpi {
            let link = crate::backend::mpi::MpiLink::new(Arc::clone(session));
            let carrier = self.connect_link(membership.clone(), link, deadline)?;
            return Ok(Group::new(Arc::clone(self), membership, carrier));
        }
        let carrier: Arc<dyn Carrier> = match &self.endpoint {
            Some(endpoint) if self.backend == Backend::Tcp || !one_host => {
                self.connect_link(membership.clone(), TcpLink::new(Arc::clone(endpoint)), deadline)?
            }
            _ if one_host => Arc::new(self.connect_local(membership.clone(), deadline)?),
            _ => {
                let problem =
                    format!("group {} spans several hosts; use auto, tcp or mpi", membership.group_name);
                return Err(Error::Backend { backend: "local", problem });
            }
        };
        Ok(Group::new(Arc::clone(self), membership, carrier))
    }

    /// A group over a link: hierarchical where its ranks lie host by host, unless sockets were asked for by name.
    pub(super) fn connect_link<L: Link + 'static>(
        &self,
        membership: Membership,
        link: L,
        deadline: Instant,
    ) -> Result<Arc<dyn Carrier>> {
        let place = Place::find(&membership.ranks, membership.me, &self.hosts);
        let flat = MessageCarrier::new(membership.clone(), link, self.limits.staging_bytes);
        let Some(place) = place.filter(|_| self.backend != Backend::Tcp) else { return Ok(Arc::new(flat)) };
        let first = place.host * place.ranks_per_host;
        let neighbours = &membership.ranks[first..first + place.ranks_per_host];
        let group_id = HOST_GROUP_BIT | membership.group_id << 20 | place.host as u64;
        let name = format!("{} on host {}", membership.group_name, place.host);
        let inside = self.membership(group_id, name, neighbours, place.index);
        let host = self.connect_local(inside, deadline)?;
        Ok(Arc::new(HierarchicalCarrier::new(flat, host, place)))
    }
}
