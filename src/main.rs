//! The program: what was typed, what it means, doing it, and an exit code.
//!
//! Exit codes: 0 fine, 1 failed, 2 usage or configuration.

use std::process::ExitCode;

use clap::Parser as _;
use paceline::{
    app::{self, App, faults},
    cli,
    config::{Complaint, Config, Purpose},
    log, panics,
    store::postgres,
};

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn main() -> ExitCode {
    let typed = cli::Cli::parse();
    let command = typed.chosen();
    if let cli::Command::Alone(command) = &command {
        return alone(command, typed.config.is_some());
    }
    let purpose = match command {
        cli::Command::Run | cli::Command::Check => Purpose::Serve,
        _ => Purpose::Look,
    };
    let config = Config::load_for(purpose, typed.config.as_deref(), &env);
    if command == cli::Command::Check {
        return check(cli::check::check(config));
    }
    let config = match (config, command.at()) {
        (Ok(config), _) => config,
        (Err(_), Some(at)) if at.admin.is_some() => {
            eprintln!(
                "paceline: going on without the configuration, which has faults; `paceline check` says which"
            );
            Config::built_in()
        }
        (Err(faults), at) => {
            eprintln!("{faults}");
            if at.is_some() {
                eprintln!("or name a replica's listener with --admin http://HOST:PORT");
            }
            return ExitCode::from(2);
        }
    };
    if command == cli::Command::Run {
        let faults = faults::faults(&config, &env);
        if !faults.is_empty() {
            faults.iter().for_each(|fault| eprintln!("{fault}"));
            return ExitCode::from(2);
        }
    }
    let done = match command {
        cli::Command::Run => run(config),
        cli::Command::Env => print(cli::env::env(&config)),
        cli::Command::Ca(cli::CaCommand::Init { unconstrained }) => print(cli::ca::init(
            &config.ca.dir,
            app::intercepted(&config),
            unconstrained,
        )),
        cli::Command::Ca(cli::CaCommand::Show) => print(cli::ca::show(&config.ca.dir)),
        cli::Command::Ca(cli::CaCommand::Bundle { output: None }) => {
            print(cli::ca::bundle(&config.ca.dir))
        }
        cli::Command::Ca(cli::CaCommand::Bundle { output: Some(file) }) => {
            print(cli::ca::bundle_into(&config.ca.dir, &file))
        }
        cli::Command::Health { at } => health(&config, &at),
        cli::Command::Operate(operate) => operate_on(&config, &operate),
        cli::Command::Check | cli::Command::Alone(_) => Ok(()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => failed(&e),
    }
}

fn failed(e: &anyhow::Error) -> ExitCode {
    eprintln!("paceline: {e:#}");
    match e.is::<cli::Usage>() {
        true => ExitCode::from(2),
        false => ExitCode::FAILURE,
    }
}

fn print<E: Into<anyhow::Error>>(text: Result<String, E>) -> anyhow::Result<()> {
    use std::io::Write as _;
    std::io::stdout().write_all(text.map_err(Into::into)?.as_bytes())?;
    Ok(())
}

fn run(config: Config) -> anyhow::Result<()> {
    let ended = serve(config);
    log::flush();
    ended
}

#[tokio::main]
async fn serve(config: Config) -> anyhow::Result<()> {
    log::start(&env).map_err(cli::Usage)?;
    panics::watch();
    app::raise_file_limit();
    app::keep_no_core();
    tracing::info!("{}", config.summary().to_string().replace('\n', "; "));
    let app = App::new(config).await?;
    tracing::info!("proxy listening on {}", app.proxy_address);
    tracing::info!("admin listening on {}", app.admin_address);
    match app.exports() {
        Ok(text) => print(Ok::<_, anyhow::Error>(text))?,
        // Serving does not need the bundle: a folder that is only readable is a good place for a CA.
        Err(e) => tracing::warn!(
            "no export lines, for the bundle of roots cannot be written to the CA's folder: {e}; \
             make it elsewhere with `paceline ca bundle`"
        ),
    }
    app.run(env).await
}

#[tokio::main(flavor = "current_thread")]
async fn operate_on(config: &Config, operate: &cli::Operate) -> anyhow::Result<()> {
    let listener = cli::admin::AdminListener::new(operate.at(), &config.admin, &env)?;
    print(listener.carry_out(operate).await)
}

#[tokio::main(flavor = "current_thread")]
async fn health(config: &Config, at: &cli::At) -> anyhow::Result<()> {
    let listener = cli::admin::AdminListener::new(at, &config.admin, &env)?;
    print(listener.health().await)
}

#[tokio::main]
async fn alone(command: &cli::Alone, config: bool) -> ExitCode {
    if config {
        eprintln!("paceline: this command reads no configuration; leave out --config");
        return ExitCode::from(2);
    }
    // What replicas log would get between the lines of a demo, unless it is asked for.
    if env("PACELINE_LOG").is_some()
        && let Err(e) = log::start(&env)
    {
        return failed(&cli::Usage(e).into());
    }
    let done = match command {
        cli::Alone::Demo(options) => cli::demo::run(options, &env).await,
        cli::Alone::Doctor(options) => cli::doctor::run(options, &env)
            .await
            .and_then(|(report, is_well)| print(Ok::<_, anyhow::Error>(report)).map(|()| is_well)),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => failed(&e),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn check(mut report: cli::check::CheckReport) -> ExitCode {
    if let Some(config) = report.config.clone() {
        let faults = faults::of_ca(&config).into_iter();
        let faults = faults.chain(faults::faults(&config, &env));
        let mut url_is_wrong = false;
        for fault in faults {
            url_is_wrong |= fault.key == "store.url";
            report.add_fault(fault.to_string());
        }
        for warning in faults::warnings(&config) {
            report.add_note(format!("warning: {warning}"));
        }
        if let Some(store) = config.store.as_ref().filter(|_| !url_is_wrong) {
            match postgres::try_once(store, &config.destinations).await {
                Ok(lines) => {
                    for line in lines
                        .iter()
                        .chain(&[store.outage_in_words(&config.destinations)])
                    {
                        report.add_note(format!("store: {line}"));
                    }
                }
                Err(e) => {
                    let complaint = Complaint::new(e.what(), e.reason().advice());
                    report.add_fault(config.fault_of_url(&env, complaint).to_string());
                }
            }
        }
    }
    print!("{}", report.stdout());
    eprint!("{}", report.stderr());
    ExitCode::from(report.exit_code())
}
